"""Whether blocks on the disk are read past the pool: what a worker finds out, and what the scheduler makes of it."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import numpy as np
import pytest

from engine_plugin.copy.contract import Fragments
from engine_plugin.copy.reads import HANGS_S, DirectReads
from engine_plugin.vllm.direct import READ_BYTES_MIN, DirectLoads, Opening
from engine_plugin.vllm.rates import PROBE_S, LoadPolicy
from kvstore.direct import DiskExtent
from tests.plugin.host_reads import PlainFiles, host_reads

BLOCK = 4096
MIB = 1 << 20


class Unavailable(Exception):
    def __init__(self, reason: str) -> None:
        super().__init__(f"there is {reason}")
        self.reason = reason


class Driver:
    """Opens reads, or says why not.

    Attributes:
        asked: Whether going through the host would do, for each attempt.
    """

    def __init__(self, *, nvidia_fs: bool = False, problem: BaseException | None = None) -> None:
        self.nvidia_fs, self.problem = nvidia_fs, problem
        self.asked: list[bool] = []
        self.files: list[PlainFiles] = []
        self.time = 0.0
        self.go = threading.Event()
        self.go.set()

    def open(self, compat: bool) -> DirectReads:
        self.asked.append(compat)
        assert self.go.wait(60)
        if self.problem is not None:
            raise self.problem
        if not self.nvidia_fs and not compat:
            raise Unavailable("no_nvidia_fs")
        reads, files = host_reads(BLOCK, now=lambda: self.time)
        self.files.append(files)
        files.how = "gds" if self.nvidia_fs else "gds_compat"
        return reads


def settled(opening: Opening, daemon: str | None) -> tuple[str, str] | None:
    """What there is to report when the worker has looked."""
    news = opening.settle(daemon)
    if opening._thread is not None:
        opening._thread.join()
        news = opening.settle(daemon)
    assert opening.settle(daemon) is None  # once
    return news


@pytest.mark.parametrize(
    ("nvidia_fs", "setting", "daemon", "news"),
    [
        (False, None, "on", ("on", "gds_compat")),
        (False, None, "auto", ("auto", "no_nvidia_fs")),
        (False, "on", "off", ("on", "gds_compat")),
        (False, "off", "on", ("off", "off")),
        (False, None, "", ("off", "off")),  # a daemon that has never heard of it
        (True, None, "auto", ("auto", "gds")),
        (True, "auto", "off", ("auto", "gds")),
    ],
)
def test_what_is_asked_for_and_what_there_is(
    nvidia_fs: bool, setting: str | None, daemon: str, news: tuple[str, str]
) -> None:
    driver = Driver(nvidia_fs=nvidia_fs)
    opening = Opening(setting, driver.open)
    assert settled(opening, daemon) == news
    assert (opening.reads is not None) == (news[1] in ("gds", "gds_compat"))
    assert driver.asked == ([] if news[0] == "off" else [news[0] == "on"])
    opening.close()


def test_who_is_not_attached_waits_for_what_the_daemon_says() -> None:
    driver = Driver()
    opening = Opening(None, driver.open)
    assert opening.settle(None) is None and not driver.asked
    assert settled(opening, "auto") == ("auto", "no_nvidia_fs")
    # It comes back, and asks for more; then for less.
    assert settled(opening, "on") == ("on", "gds_compat") and driver.asked == [False, True]
    assert settled(opening, "auto") == ("auto", "no_nvidia_fs")
    assert settled(opening, "off") == ("off", "off") and driver.asked == [False, True]
    opening.close()


@pytest.mark.parametrize(
    ("problem", "setting", "reason", "level"),
    [
        (Unavailable("no_kvikio"), "on", "no_kvikio", logging.WARNING),
        (Unavailable("no_kvikio"), "auto", "no_kvikio", logging.INFO),
        (Unavailable("error"), "auto", "error", logging.WARNING),
        (RuntimeError("a defect"), "auto", "error", logging.ERROR),
        (SystemExit("a library that ends its thread"), "auto", "error", logging.ERROR),
    ],
)
def test_why_not_is_said_once(
    problem: BaseException, setting: str, reason: str, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    opening = Opening(setting, Driver(problem=problem).open)
    with caplog.at_level(logging.INFO, "vllm.kvstore"):
        assert settled(opening, "off") == (setting, reason)
    (record,) = caplog.records
    assert record.levelno == level and str(problem) in record.message
    assert opening.reads is None
    opening.close()


def test_a_thread_that_cannot_be_had_is_said_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    opening = Opening("on", Driver().open)
    with monkeypatch.context() as context:
        context.setattr(threading.Thread, "start", start)
        assert settled(opening, "on") == ("on", "error")
    (record,) = caplog.records
    assert record.levelno == logging.ERROR and "new thread" in record.message
    opening.close()


def test_an_engine_does_not_wait_while_it_looks() -> None:
    driver = Driver()
    driver.go.clear()
    opening = Opening("on", driver.open)
    for _ in range(3):
        assert opening.settle("on") is None and opening.reads is None
    assert driver.asked == [True]
    driver.go.set()
    opening.close()  # also where it has just been opened
    assert opening.reads is not None
    with pytest.raises(RuntimeError):
        opening.reads.begin([], None, None)


def test_a_medium_that_hangs_is_tried_again_when_it_has_come_back(tmp_path: Path) -> None:
    driver = Driver(nvidia_fs=True)
    opening = Opening("auto", driver.open)
    assert settled(opening, "auto") == ("auto", "gds")
    (files,) = driver.files
    files.go.clear()
    (tmp_path / "slab").write_bytes(bytes(BLOCK))
    ends: list[BaseException | None] = []
    nothing = Fragments(*(np.zeros(0, np.uint64) for _ in range(3)))
    extents = [DiskExtent(str(tmp_path / "slab"), 0, BLOCK, 0)]
    hanging = opening.reads
    job = hanging.begin(extents, nothing, lambda _seconds, error: ends.append(error))
    assert files.waited.wait(60)
    opening.poll()
    assert opening.reads is hanging and not ends
    driver.time += HANGS_S
    opening.poll()
    assert opening.reads is None and isinstance(ends[0], TimeoutError)
    opening.wait([job])
    assert settled(opening, "auto") == ("auto", "hangs")
    opening.poll()
    assert settled(opening, "auto") is None and not files.closed
    files.go.set()
    hanging._thread.join()
    opening.poll()
    assert files.closed and settled(opening, "auto") == ("auto", "gds")
    opening.close()
    assert len(ends) == 1


class Loads:
    """The scheduler's end, with a clock."""

    def __init__(self, ranks: int = 1, block_bytes: int = MIB) -> None:
        self.time = 100.0
        self.policy = LoadPolicy(block_bytes, lambda: self.time)
        self.direct = DirectLoads(ranks, block_bytes, self.policy, lambda: self.time)


def test_only_what_is_large_is_read_past_the_pool() -> None:
    for block_bytes, least in ((MIB, READ_BYTES_MIN // MIB), (READ_BYTES_MIN + 4096, 1), (READ_BYTES_MIN - 4096, 2)):
        loads = Loads(block_bytes=block_bytes)
        assert loads.direct.extents_min() == 0 and not loads.direct.on  # nobody has looked
        loads.direct.report(0, "on", "gds_compat")
        assert loads.direct.extents_min() == least and loads.direct.on


def test_all_ranks_have_to_be_able_to() -> None:
    loads = Loads(ranks=2)
    loads.direct.report(0, "on", "gds")
    assert loads.direct.extents_min() == 0 and not loads.direct.counts
    loads.direct.report(1, "on", "no_memory")
    assert loads.direct.extents_min() == 0 and dict(loads.direct.counts) == {("gds_fallbacks", "no_memory"): 1}
    loads.direct.report(1, "on", "gds")
    assert loads.direct.extents_min()
    for rank in range(2):
        loads.direct.report(rank, "auto", "gds")
    assert loads.direct.extents_min() == 0 and loads.direct.counts["gds_fallbacks", "several_ranks"] == 1
    for rank in range(2):
        loads.direct.report(rank, "off", "off")
    assert loads.direct.extents_min() == 0 and ("gds_fallbacks", "off") not in loads.direct.counts


def test_a_load_that_failed_is_followed_by_some_through_the_pool() -> None:
    loads = Loads()
    loads.direct.report(0, "on", "gds_compat")
    loads.direct.failed("damaged")
    assert loads.direct.extents_min() == 0 and loads.direct.counts["gds_fallbacks", "damaged"] == 1
    loads.time += PROBE_S - 1
    assert loads.direct.extents_min() == 0
    loads.time += 2
    assert loads.direct.extents_min()


def test_auto_takes_the_faster_way() -> None:
    loads = Loads()
    policy, direct = loads.policy, loads.direct
    direct.report(0, "auto", "gds")
    assert direct.extents_min()  # nothing is known: it is tried
    policy.note_direct(10 * MIB, 0.010)  # 1 ms a block
    assert not direct.extents_min()  # and then the other
    policy.note_load(10 * MIB, 0.002, 0.004)  # from the pool 0.2 ms
    policy.note_coming("disk", 10, 0.009)  # up there 0.9 ms
    assert direct.extents_min()
    policy.note_coming("disk", 1000, 0.5)
    assert not direct.extents_min()
    loads.time += PROBE_S + 1
    assert direct.extents_min()  # what was slower is tried again
    policy.note_direct(1000 * MIB, 0.1)
    assert not direct.extents_min()  # the pool's figure is old as well
    policy.note_coming("disk", 1000, 0.5)
    assert direct.extents_min()


def test_what_is_slower_than_computing_is_not_read_past_the_pool_either() -> None:
    loads = Loads()
    policy = loads.policy
    policy.note_step(1000, 1000, 1.0)  # a token takes 1 ms to compute
    policy.note_direct(10 * MIB, 0.02)  # and its block 2 ms from the disk
    assert not policy.direct_pays(5 * MIB, 5, 0.0) and policy.direct_pays(5 * MIB, 20, 0.0)
    assert not policy.direct_pays(5 * MIB, 5, 0.001)  # measured is measured
    assert policy.counts["decisions", "compute_below"] == 2
    loads.time += PROBE_S + 1
    assert not policy.direct_pays(5 * MIB, 5, 0.006)
    assert policy.direct_pays(5 * MIB, 5, 0.004)  # by what the daemon says of its disk by now


def test_what_nobody_has_measured_is_computed_and_the_daemon_brings_it_up_to_learn() -> None:
    loads = Loads()
    loads.direct.report(0, "auto", "gds")
    policy = loads.policy
    assert not policy.direct_pays(5 * MIB, 5, 0.001)  # how fast this engine computes is not known either
    policy.note_step(1000, 1000, 1.0)
    assert policy.direct_pays(5 * MIB, 5, 0.005)
    assert not policy.direct_pays(5 * MIB, 5, 0.006)
    assert loads.direct.extents_min()
    assert not policy.direct_pays(5 * MIB, 5, 0.0)
    assert not loads.direct.extents_min()
    loads.time += PROBE_S + 1
    assert loads.direct.extents_min()
