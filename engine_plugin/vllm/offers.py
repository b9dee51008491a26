"""How often blocks were offered for storing, for vLLM's `store_threshold`. Knows nothing of vLLM.

Offers are counted, not lookups: a lookup stops at the first block that is missing, so that of a long new prefix each
repeat would count one block more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class Offers:
    """Counts offers of blocks.

    Args:
        threshold: A block is due when it is offered for this many times; below 2: at once.
        most: Most blocks that are counted; the one that was offered longest ago is forgotten first, and of an offer
            that is longer than this the front is counted, since a prefix is of use only from its start.
    """

    def __init__(self, threshold: int = 0, most: int = 64_000) -> None:
        self._threshold = threshold
        self._most = most
        self._counts: OrderedDict[bytes, int] = OrderedDict()

    def due(self, keys: Sequence[bytes]) -> list[bytes]:
        """Counts one offer of each, and gives those that are due."""
        if self._threshold < 2:
            return list(keys)
        counts = self._counts
        known = [key for key in keys if key in counts]
        for key in known:
            counts[key] += 1
            counts.move_to_end(key)
        fresh = [key for key in keys if key not in counts]
        others = len(counts) - len(known)  # these come first in the order
        for _ in range(min(others, len(counts) + len(fresh) - self._most)):
            counts.popitem(last=False)
        counts.update((key, 1) for key in fresh[: max(0, self._most - len(counts))])
        return [key for key in known if counts[key] >= self._threshold]
