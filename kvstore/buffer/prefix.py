"""Which stored tokens answer which query, and how to tell without reading all of them.

An entry notes hashes of prefixes of its tokens: of all of them, and of every `step` tokens (its ladder). A query
hashes its own prefixes at the same lengths. So a query that is as long as the entry or longer is decided by one hash; a
shorter one by the rung below its end, and by the few tokens above that rung where there are some.
"""

from __future__ import annotations

import enum
import hashlib
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidRequest
from kvstore.tensors import bytes_of

#: Rungs of a ladder: what fits a head beside the rest. The step doubles until there are no more than these.
_RUNGS_MAX: Final = 32
_STEP_MIN: Final = 64
#: Bytes of a hash. It only has to find: whoever takes an entry compares the tokens themselves.
_HASH_BYTES: Final = 16

Tokens = npt.NDArray[np.int64]


class Answer(enum.Enum):
    """Whether an entry answers a query, as far as its notes tell."""

    NO = "no"
    YES = "yes"
    READ = "read"  # compare the tokens themselves


def selected(input_tokens: Any, roi: Any) -> Tokens | None:
    """The tokens that a mask selects; all where there is no mask, None where there are no tokens.

    Args:
        input_tokens: Integers, one axis; or None.
        roi: As long as the tokens; booleans, or numbers above 0.5 for yes; or None.

    Raises:
        InvalidRequest: other shapes or types.
    """
    if input_tokens is None:
        return None
    tokens = _array(input_tokens, "input_tokens")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise InvalidRequest(f"input_tokens is {tokens.dtype}{list(tokens.shape)}: give integers, one axis")
    tokens = tokens.astype(np.int64)
    if roi is None:
        return tokens
    mask = _array(roi, "roi")
    if mask.shape != tokens.shape or mask.dtype.kind not in "biuf":
        raise InvalidRequest(f"roi is {mask.dtype}{list(mask.shape)}: give a mask as long as the {len(tokens)} tokens")
    return tokens[mask if mask.dtype.kind == "b" else mask > 0.5]


def _array(value: Any, name: str) -> npt.NDArray[Any]:
    spec, data = bytes_of(value)
    try:
        return data.view(np.dtype(spec.dtype)).reshape(spec.shape)
    except TypeError as error:
        raise InvalidRequest(f"{name} has dtype {spec.dtype}") from error


def is_prefix(one: Tokens, other: Tokens) -> bool:
    """Whether one begins with the other, and they share a token at all."""
    shorter = min(len(one), len(other))
    return shorter > 0 and bool(np.array_equal(one[:shorter], other[:shorter]))


class Prefixes:
    """Tokens and the hashes of their prefixes, made when they are asked for."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self._hashes: dict[int, str] = {}

    def hash_of(self, length: int) -> str:
        """Hash of the first `length` tokens."""
        if length not in self._hashes:
            # Not chained from the last one asked for: entries are asked about in no order.
            digest = hashlib.sha256(self.tokens[:length].astype("<i8").tobytes()).digest()
            self._hashes[length] = digest[:_HASH_BYTES].hex()
        return self._hashes[length]

    def notes(self) -> dict[str, Any]:
        """What an entry of these tokens notes."""
        step = _STEP_MIN
        while len(self.tokens) // step > _RUNGS_MAX:
            step *= 2
        running = hashlib.sha256()
        ladder = []
        for start in range(0, len(self.tokens) - step + 1, step):
            running.update(self.tokens[start : start + step].astype("<i8").tobytes())
            ladder.append(running.copy().digest()[:_HASH_BYTES].hex())
        return {"length": len(self.tokens), "hash": self.hash_of(len(self.tokens)), "step": step, "ladder": ladder}

    def answered_by(self, notes: dict[str, Any]) -> Answer:
        """Whether an entry answers this query."""
        asked, stored = len(self.tokens), int(notes["length"])
        if not asked or not stored:
            return Answer.NO
        if stored <= asked:
            return Answer.YES if self.hash_of(stored) == notes["hash"] else Answer.NO
        rung = asked // int(notes["step"])
        if rung and self.hash_of(rung * int(notes["step"])) != notes["ladder"][rung - 1]:
            return Answer.NO
        return Answer.READ if asked % int(notes["step"]) else Answer.YES
