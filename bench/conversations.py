"""Multi-turn conversations from a seed: system prompts that several share, and a prefix that grows turn by turn."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

_VOCABULARY: Final = 150_000


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """How large the conversations are. Lengths in tokens.

    Attributes:
        conversations: How many go on side by side.
        turns: Questions in each.
        system_prompts: Different system prompts; conversations share them in turn.
        system_tokens: Length of a system prompt.
        question_tokens: Shortest and longest question.
        answer_tokens: Shortest and longest answer.
    """

    conversations: int = 10
    turns: int = 6
    system_prompts: int = 3
    system_tokens: int = 1024
    question_tokens: tuple[int, int] = (100, 400)
    answer_tokens: tuple[int, int] = (64, 256)


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """One request to an engine.

    Attributes:
        conversation: Which one.
        turn: Its index there.
        prompt: Tokens of system prompt, history and question.
        answer: Tokens that the engine will say. An engine's output is what makes the next prompt, so it is part of the
            script.
    """

    conversation: int
    turn: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def script(seed: int, shape: Shape) -> Iterator[Turn]:
    """Every turn, the conversations taking it in turns. The same seed gives the same script in every process."""
    source = random.Random(seed)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(source.randrange(_VOCABULARY) for _ in range(length))

    systems = [tokens(shape.system_tokens) for _ in range(shape.system_prompts)]
    histories = [systems[index % shape.system_prompts] for index in range(shape.conversations)]
    for turn in range(shape.turns):
        for conversation in range(shape.conversations):
            prompt = histories[conversation] + tokens(source.randint(*shape.question_tokens))
            answer = tokens(source.randint(*shape.answer_tokens))
            histories[conversation] = prompt + answer
            yield Turn(conversation, turn, prompt, answer)


def chained_keys(tokens: Sequence[int], block_size: int) -> list[bytes]:
    """One key for each full block of tokens: a hash of its tokens and the key before it, as engines make them."""
    keys: list[bytes] = []
    parent = b""
    for start in range(0, len(tokens) - block_size + 1, block_size):
        block = np.asarray(tokens[start : start + block_size], dtype="<u4").tobytes()
        parent = hashlib.sha256(parent + block).digest()
        keys.append(parent)
    return keys


def block_content(key: bytes, block_bytes: int) -> npt.NDArray[np.uint8]:
    """Stands for the KV of a block: every byte follows from the key, so any process can tell whether it is right."""
    source = np.random.Generator(np.random.SFC64(int.from_bytes(key, "little")))
    return source.integers(0, 1 << 64, size=-(-block_bytes // 8), dtype=np.uint64).view(np.uint8)[:block_bytes]
