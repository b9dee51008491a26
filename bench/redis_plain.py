"""A process that moves blocks with redis-py and nothing else, as an application would: for bench.redis.

Run as a program: PORT BLOCK_BYTES COUNT, and "without-hiredis" for what `pip install redis` gives by itself; redis-py
takes hiredis by itself where it is installed. Reads "get" or "set" and the number of the batch from its input, one a
line, moves all blocks one after another, and answers with the seconds that it took. What was got is copied to its
place.
"""

from __future__ import annotations

import sys
import time

from bench.harness import private_memory


def names(batch: int, count: int) -> list[bytes]:
    """Keys of a batch."""
    return [b"plain:%d:%d" % (batch, number) for number in range(count)]


def main() -> None:
    """See the module."""
    port, block_bytes, count = map(int, sys.argv[1:4])
    if sys.argv[4:] == ["without-hiredis"]:
        sys.modules["hiredis"] = None  # type: ignore[assignment]  # what an import of it finds then: nothing
    from redis import Redis
    from redis.utils import HIREDIS_AVAILABLE

    assert (sys.argv[4:] == []) == HIREDIS_AVAILABLE
    client = Redis(port=port)
    memory = memoryview(private_memory(2 * block_bytes * count)).cast("B")
    blocks = [memory[at : at + block_bytes] for at in range(0, len(memory), block_bytes)]
    datas, rooms = blocks[:count], blocks[count:]
    for at, data in enumerate(datas):
        data[:8] = data[-8:] = (at + 1).to_bytes(8, "little")
    print("ready", flush=True)
    for verb, number in map(str.split, sys.stdin):
        keys = names(int(number), count)
        begun = time.perf_counter()
        if verb == "set":
            for key, data in zip(keys, datas, strict=True):
                client.set(key, data)
        else:
            for key, room in zip(keys, rooms, strict=True):
                room[:] = client.get(key)
        taken = time.perf_counter() - begun
        if verb == "get":
            for data, room in zip(datas, rooms, strict=True):
                assert room[:4096] == data[:4096] and room[-4096:] == data[-4096:]
                room[:8] = bytes(8)
        print(taken, flush=True)


if __name__ == "__main__":
    main()
