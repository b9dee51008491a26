"""How many tokens and bytes the blocks of a request stand for: what load-or-recompute is decided by.

In a model with several KV-cache groups a token has a block in each of them, and of windows only the end of a prefix is
loaded, which is worth all that comes before it. Knows nothing of vLLM.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Final

from engine_plugin.vllm.runs import by_group


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """What a block of a KV-cache group is: how many tokens, and how many bytes of it are copied."""

    tokens: int
    size_bytes: int


_UNIT: Final = Block(1, 1)


class Worth:
    """See the module.

    Args:
        blocks: What a block of each group is; those that are not named count one of each.
        windowed: Groups of which the end of a prefix is needed only, and how many of its blocks.
        end_of: Gives the token of a request at which a key's block ends; needed where all groups are such.
    """

    def __init__(
        self,
        blocks: Mapping[int, Block],
        windowed: Mapping[int, int],
        end_of: Callable[[str, bytes], int | None],
    ) -> None:
        self._blocks = blocks
        self._windowed = windowed
        self._end_of = end_of
        #: What all blocks are, where there is one group: its keys need not be looked at one by one.
        self._all = next(iter(blocks.values()), _UNIT) if len(blocks) <= 1 and not windowed else None

    def tokens(self, req_id: str, asked: Collection[bytes], found: Collection[bytes]) -> int:
        """Tokens of a request that need not be computed where these of the keys that were asked for are there."""
        if self._all is not None:
            return len(found) * self._all.tokens
        groups = by_group(found)
        prefixes = [group for group in by_group(asked) if group not in self._windowed]
        if prefixes:
            return min(len(groups.get(group, ())) * self._block(group).tokens for group in prefixes)
        # Ends of prefixes are all there is: the latest one that was found stands for all from where the engine asks.
        reached = max((self._end_of(req_id, key) or 0 for key in found), default=0)
        begin = min((self._end_of(req_id, key) or 0 for key in asked), default=0)
        return max(0, reached - max(0, begin - max(self._block(group).tokens for group in self._windowed)))

    def size_bytes(self, keys: Collection[bytes]) -> int:
        """Bytes of these blocks."""
        if self._all is not None:
            return len(keys) * self._all.size_bytes
        return sum(len(members) * self._block(group).size_bytes for group, members in by_group(keys).items())

    def windows_bytes(self, tokens: int) -> int:
        """Bytes of the windows that end a prefix of so many tokens."""
        return sum(
            min(most, -(-tokens // self._block(group).tokens)) * self._block(group).size_bytes
            for group, most in self._windowed.items()
        )

    def _block(self, group: int) -> Block:
        return self._blocks.get(group, _UNIT)
