"""A daemon for tests that kill its clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.blocks import Namespace
from tests.support import Daemon, running_daemon

NAMESPACE = Namespace(model="crash", dtype="bfloat16", block_size=64, block_bytes=1 << 20)

#: A client process that does what it is told, a word a line, and says when it is done.
ACTOR = """
import os, sys
import numpy as np
import kvstore
from kvstore.testing import make_block

ns = kvstore.Namespace(model="crash", dtype="bfloat16", block_size=64, block_bytes=1 << 20)
client = kvstore.connect(sys.argv[1], ns, group=sys.argv[2], timeout_s=60, prefault=False)
kept = []
print("attached", flush=True)
for line in sys.stdin:
    what, *names = line.split()
    keys = [name.encode() for name in names]
    said = "done"
    if what == "put":
        result = client.insert(keys, [make_block(key, 1 << 20) for key in keys]).wait(60)
        said = f"{result.stored} {result.exists}"
    elif what == "acquire":
        (lease,) = client.acquire([(0, keys)])
        kept.append(lease)
        said = str(len(lease.offsets))
    elif what == "reserve":
        kept.append(client.reserve(int(names[0])))
        said = str(len(kept[-1].offsets))
    elif what == "half":  # fills slots half, and dies before anybody knows their keys
        slots = client.reserve(int(names[0]))
        pool = client.arena.as_numpy()
        for offset in slots.offsets.tolist():
            pool[offset : offset + (1 << 19)] = 7
        kept.append((slots, pool))
    elif what == "insert":  # and does not wait
        kept.append(client.insert(keys, [make_block(key, 1 << 20) for key in keys]))
    elif what == "take":
        taken = client.drop_select(keys, 60)
        found = taken.__enter__()
        kept.append((taken, found))
        said = " ".join("right" if bytes(view) == make_block(key, 1 << 20) else "wrong"
                        for key, view in zip(keys, found))
    elif what == "view":
        with client.select(keys, 60) as found:
            kept.append(np.frombuffer(found[0], dtype=np.uint8))
    elif what == "check":
        said = "right" if bytes(kept[-1]) == make_block(keys[0], 1 << 20) else "wrong"
    elif what == "confirm":
        kept.pop()[0].__exit__(None, None, None)
    print(said, flush=True)
"""


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with running_daemon() as daemon:
        yield daemon
        assert daemon.process is not None and daemon.process.poll() is None, daemon.log.read_text()
        daemon.check_nothing_held()
