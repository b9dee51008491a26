"""Loads past the pool inside vLLM's own scheduler (see scheduler_rig), with files on this host read by its CPU."""

from __future__ import annotations

import functools
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_plugin.copy import reads
from tests.plugin.fakes import SLOT_BYTES, FakeDaemon
from tests.plugin.host_reads import PlainFiles, host_reads
from tests.vllm.scheduler_rig import BLOCK_TOKENS, SchedulerRig

pytestmark = pytest.mark.filterwarnings("ignore")
BLOCKS = 7
IN_POOL = 2


class Place:
    """A daemon whose blocks lie in files, and engines that read them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: Path, folder: Path) -> None:
        from engine_plugin.vllm import direct, spec

        self.daemon = FakeDaemon(64)
        self.daemon.gds, self.daemon.folder = "on", folder
        self.files: list[PlainFiles] = []
        self.problem: Exception | None = None
        self.wait = True
        self.engines: list[SchedulerRig] = []
        self._make = functools.partial(SchedulerRig, monkeypatch, model, self.daemon)

        class Opening(direct.Opening):
            def settle(self, daemon: str | None) -> tuple[str, str] | None:
                news = super().settle(daemon)
                if self._thread is None:
                    return news
                self._thread.join()
                return super().settle(daemon)

        monkeypatch.setattr(spec, "Opening", Opening)
        monkeypatch.setattr(direct, "READ_BYTES_MIN", 3 * SLOT_BYTES)
        monkeypatch.setattr(spec.KVStoreSpec, "_open_reads", lambda _spec, *args: self._open(*args))

    def _open(self, device: str, block_bytes: int, compat: bool) -> Any:
        assert (device, block_bytes) == ("cpu", SLOT_BYTES)
        if self.problem is not None:
            raise self.problem
        reads, files = host_reads(block_bytes)
        self.files.append(files)
        begin = reads.begin

        def begin_and_wait(*args: Any) -> Any:
            job = begin(*args)
            if self.wait:
                reads.wait([job])
            return job

        reads.begin = begin_and_wait  # type: ignore[method-assign]
        return reads

    def engine(self, *, extra: dict[str, Any] | None = None, **options: Any) -> SchedulerRig:
        extra = {"kvstore.load_policy": "always", **(extra or {})}
        self.engines.append(self._make(extra=extra, **options))
        return self.engines[-1]

    def stored(self, seed: int, in_pool: int = 0) -> list[int]:
        """A prompt whose blocks are on the disk, and the first ones in the pool."""
        before = set(self.daemon.blocks)
        prompt = tokens(seed)
        self.engine(role="kv_producer").answer(f"stored {seed}", prompt)
        keys = [key for key in self.daemon.blocks if key not in before]
        assert len(keys) == BLOCKS
        for key in keys:
            self.daemon.copy_down(key)
        for key in keys[in_pool:]:
            self.daemon.evict(key)
        return prompt

    def run(self, engine: SchedulerRig, when_failed: Callable[[], object] = lambda: None) -> None:
        """Steps until all is answered, with every copy and promotion ending in its step."""
        for _ in range(400):
            while engine.copies.end_one(True) or engine.copies.end_one(False):
                pass
            if not engine.step():
                for key in list(self.daemon.coming):
                    self.daemon.come_up(key)
            if engine.failed_loads:
                when_failed()
            if not engine.scheduler.has_requests():
                return
        raise AssertionError(f"the engine does not come to rest: {engine.alive()}")

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        assert all(files.closed for files in self.files)
        self.daemon.check()
        assert not self.daemon.leases and not self.daemon.leased and not self.daemon.reserved


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path) -> Iterator[Place]:
    place = Place(monkeypatch, model, tmp_path)
    yield place
    place.close()


def test_the_checksum_of_the_gpu_is_that_of_the_disk() -> None:
    """The kernels in Triton's interpreter, which has to be chosen before Triton is imported."""
    program = """
import torch, xxhash
from engine_plugin.copy.xxh3 import Digests, finish
for size in (1024, 2048, 3072, 20480):
    blocks = torch.randint(-(1 << 62), 1 << 62, (2, size // 8))
    wanted = [xxhash.xxh3_64_intdigest(block.numpy().tobytes()) for block in blocks]
    assert finish(Digests(torch.device("cpu")).queue(blocks).tolist(), size) == wanted, size
"""
    environ = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", program], env=environ, check=True, timeout=120)


def tokens(seed: int) -> list[int]:
    return random.Random(seed).choices(range(2, 1000), k=BLOCKS * BLOCK_TOKENS + 5)


@pytest.mark.parametrize("in_pool", [0, IN_POOL])
def test_blocks_on_the_disk_are_read_past_the_pool(place: Place, in_pool: int) -> None:
    prompt = place.stored(1, in_pool)
    engine = place.engine(role="kv_consumer")
    engine.answer("other", tokens(99))
    assert engine.answer("r", prompt) == place.engine(role="kv_producer").answer("computed", prompt)
    assert engine.counts["copied_bytes/gds_compat"] == (BLOCKS - in_pool) * SLOT_BYTES
    assert engine.counts["hit_blocks"] == BLOCKS
    assert len(place.daemon.blocks) == in_pool and not place.daemon.coming  # nothing has come up
    assert "gds_fallbacks" not in "".join(engine.counts)


def test_few_blocks_come_up_through_the_pool(place: Place) -> None:
    prompt = place.stored(1, BLOCKS - 2)
    engine = place.engine(role="kv_consumer")
    engine.answer("other", tokens(99))
    engine.add("r", prompt)
    for _ in range(3):
        engine.step()
    assert len(place.daemon.coming) == 2 and not place.daemon.leased
    for key in list(place.daemon.coming):
        place.daemon.come_up(key)
    engine.settle()
    assert engine.counts["hit_blocks"] == BLOCKS and not engine.counts.get("copied_bytes/gds_compat")


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[17] ^= 4
    path.write_bytes(content)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:40])


@pytest.mark.parametrize(("harm", "reason"), [(damage, "damaged"), (cut_off, "damaged"), (Path.unlink, "error")])
def test_what_is_wrong_on_the_disk_is_computed_and_left_to_the_daemon(
    place: Place, harm: Callable[[Path], None], reason: str
) -> None:
    daemon = place.daemon
    prompt = place.stored(1, IN_POOL)
    engine = place.engine()
    engine.answer("other", tokens(99))
    bad = list(daemon.disk)[4]
    harm(Path(daemon.extent_of(bad).path))
    engine.add("r", prompt)
    place.run(engine, lambda: daemon.disk.pop(bad, None))  # the daemon finds out when it reads it

    # The other blocks have come up through the pool, and what was bad was stored anew.
    assert engine.failed_loads == 1 and not daemon.leased
    assert engine.counts[f"load_failures/{reason}"] == engine.counts[f"gds_fallbacks/{reason}"] == 1
    assert engine.counts["hit_blocks"] == BLOCKS + 4
    assert set(daemon.disk) | {bad} <= set(daemon.blocks)

    # It is as good as any other then.
    for key in list(daemon.blocks):
        daemon.copy_down(key)
        daemon.evict(key)
    engine.reset(connector=False)
    engine.time += 60
    before = engine.counts.get("copied_bytes/gds_compat", 0)  # what was right in the load that failed
    engine.answer("last", prompt)
    assert engine.counts["copied_bytes/gds_compat"] - before == BLOCKS * SLOT_BYTES
    assert engine.failed_loads == 1


def test_after_a_failure_other_blocks_go_through_the_pool_for_a_while(place: Place) -> None:
    daemon, prompts = place.daemon, [place.stored(seed) for seed in (1, 2)]
    engine = place.engine(role="kv_consumer")
    engine.answer("other", tokens(99))
    damage(Path(daemon.extent_of(next(iter(daemon.disk))).path))
    engine.add("failed", prompts[0])
    place.run(engine)
    engine.add("second", prompts[1])
    place.run(engine)
    assert engine.failed_loads == 1 and not engine.counts.get("copied_bytes/gds_compat")


def test_what_was_read_while_the_daemon_was_restarted_is_not_used(place: Place) -> None:
    prompt = place.stored(1)
    engine = place.engine(role="kv_consumer")
    engine.answer("other", tokens(99))
    files = place.files[-1]
    place.wait = False
    files.go.clear()
    engine.add("r", prompt)
    for _ in range(8):
        engine.step()
    assert files.entered.wait(60) and place.daemon.leased
    place.daemon.die()
    engine.step()
    place.daemon.start()
    engine.attach()
    files.go.set()
    while "r" in engine.alive():
        engine.step()
    assert engine.counts["load_failures/generation"] == 1
    assert not place.daemon.leased


def test_a_disk_that_hangs_keeps_no_request_waiting(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = place.stored(1, IN_POOL)
    engine = place.engine(role="kv_consumer")
    engine.answer("other", tokens(99))
    files, place.wait = place.files[-1], False
    files.go.clear()
    engine.add("r", prompt)
    for _ in range(8):
        engine.step()
    assert files.waited.wait(60) and place.daemon.leased and "r" in engine.alive()
    with monkeypatch.context() as patch:
        patch.setattr(reads, "HANGS_S", 0.0)
        place.run(engine)
    assert engine.failed_loads == 1 and not place.daemon.leased and engine.counts["hit_blocks"] == 2 * BLOCKS
    assert engine.counts["gds_fallbacks/error"] == engine.counts["gds_fallbacks/hangs"] == 1
    assert place.files[-1] is files and not files.closed  # it is still read into what they use
    files.go.set()
    for number in range(60):
        engine.answer(f"other {number}", tokens(100 + number))
        if files.closed:
            break
    assert place.files[-1] is not files  # another attempt


@pytest.mark.parametrize(
    ("daemon", "setting", "reason"), [("on", None, "no_kvikio"), ("off", "on", "no_kvikio"), ("on", "off", "")]
)
def test_engines_without_it_load_through_the_pool(place: Place, daemon: str, setting: str | None, reason: str) -> None:
    from engine_plugin.copy.gds import GdsUnavailable

    place.daemon.gds = daemon
    place.problem = GdsUnavailable("no_kvikio", "it is not installed")
    prompt = place.stored(1)
    engine = place.engine(role="kv_consumer", extra={"kvstore.gds": setting} if setting else {})
    engine.answer("other", tokens(99))
    engine.add("r", prompt)
    for _ in range(3):
        engine.step()
    assert len(place.daemon.coming) == BLOCKS
    for key in list(place.daemon.coming):
        place.daemon.come_up(key)
    engine.settle()
    assert engine.counts["hit_blocks"] == BLOCKS and not engine.counts["gds"]
    fallbacks = {name: count for name, count in engine.counts.items() if name.startswith("gds_fallbacks")}
    assert fallbacks == ({f"gds_fallbacks/{reason}": 1} if reason else {})
