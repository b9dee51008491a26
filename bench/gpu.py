"""Copies between GPU memory and the pool, against the bus and vLLM's own ways in the same run. Needs a CUDA GPU.

The limit is a large copy of the same bytes between GPU memory and the registered pool (cut only where one registration
ends); both directions at once have a limit of their own, two large copies. Times are taken with events on the GPU, as
vLLM takes its own; *wall* is the whole call, from handing the job in until the host knows that it is over, against the
wall time of the large copy.

The fragments are those of an engine: 32 layers, each with a page of every block, random blocks unless the row says
otherwise, random slots of the pool with the layers of a block side by side. vLLM's ways get the very same addresses:
*vLLM batch* is its `swap_blocks_batch`, *vLLM kernel* its Triton kernel for small pages.
"""

from __future__ import annotations

import contextlib
import functools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import click
import numpy as np
import torch

import kvstore
from bench.harness import Ratio, Report, in_turn, running_daemon
from engine_plugin.copy.contract import Fragments
from engine_plugin.copy.cuda import CudaCopyEngine
from engine_plugin.copy.registration import CHUNK_BYTES

_LAYERS: Final = 32
#: Page, fragments, smallest share of the limit to host and to GPU.
_CASES: Final = (
    (8 << 10, 16_384, 0.85, 0.85),
    (16 << 10, 16_384, 0.85, 0.85),
    (64 << 10, 16_384, 0.95, 0.92),
    (1 << 20, 1024, 0.97, 0.97),
)
_BOTH_SHARE: Final = 0.90
_BLOCK_P50_US: Final = 400.0
_FASTER_THAN_VLLM: Final = 1.2
_DISTURBANCE: Final = 0.05
_BLOCK_BYTES: Final = 8 << 20
#: Blocks of the engine in one slot: 64 tokens of 16-token blocks.
_BLOCKS_PER_SLOT: Final = 4


class Rig:
    """KV memory of one page size, fragments of it, and a large buffer of the same size."""

    def __init__(self, arena: Any, page: int, count: int, *, order: str = "random", seed: int = 0) -> None:
        rng = random.Random(seed)
        blocks = count // _LAYERS
        self.size_bytes = blocks * _LAYERS * page
        have = min(4 * blocks, (8 << 30) // (_LAYERS * page))
        self.kv = [torch.randint(-128, 128, (have, page), dtype=torch.int8, device="cuda") for _ in range(_LAYERS)]
        self.large = torch.randint(-128, 128, (self.size_bytes,), dtype=torch.int8, device="cuda")
        ids = rng.sample(range(have), blocks)
        if order == "consecutive":
            ids = list(range(blocks))
        elif order == "runs of 4":
            ids = [first * 4 + i for first in rng.sample(range(have // 4), blocks // 4) for i in range(4)]
        per_slot = _BLOCKS_PER_SLOT if _LAYERS * page * _BLOCKS_PER_SLOT <= 64 << 20 else 1
        block_bytes = _LAYERS * page
        slots = rng.sample(range(arena.size_bytes // (block_bytes * per_slot)), -(-blocks // per_slot))
        if order == "consecutive":
            slots = list(range(len(slots)))
        base = np.array([tensor.data_ptr() for tensor in self.kv], np.uint64)
        kv = base[None] + np.array(ids, np.uint64)[:, None] * np.uint64(page)
        place = np.arange(blocks)
        start = np.array(slots, np.uint64)[place // per_slot] * np.uint64(block_bytes * per_slot)
        start += (place % per_slot).astype(np.uint64) * np.uint64(block_bytes)
        pool = np.uint64(arena.address) + start[:, None] + np.arange(_LAYERS, dtype=np.uint64)[None] * np.uint64(page)
        self.fragments = Fragments(kv.ravel(), pool.ravel(), np.full(kv.size, page, np.uint64))


def _timed(stream: torch.cuda.Stream, queue: Callable[[], None]) -> tuple[float, float]:
    """Seconds between events around what `queue` puts on a stream, and wall seconds until the host knows."""
    torch.cuda.synchronize()
    begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    started = time.perf_counter()
    begun.record(stream)
    queue()
    ended.record(stream)
    ended.synchronize()
    return begun.elapsed_time(ended) / 1e3, time.perf_counter() - started


class Bench:
    """The cases, over one engine and one daemon."""

    def __init__(self, client: kvstore.Client, rounds: int, report: Report, vllm: Vllm | None) -> None:
        assert client.arena is not None
        self.arena = client.arena
        self.client = client
        self.rounds = rounds
        self.report = report
        self.vllm = vllm
        self.engine = CudaCopyEngine("cuda")
        self.engine.use_pool(self.arena)
        while self.engine.stats().registered_bytes < self.arena.size_bytes:
            if self.engine.stats().register_error:
                raise SystemExit(self.engine.stats().register_error)
            time.sleep(0.01)
        self.runtime = self.engine._runtime
        self.streams = [torch.cuda.Stream(), torch.cuda.Stream()]

    def job(self, fragments: Fragments, load: bool) -> tuple[float, float]:
        """Seconds of one job of ours, by its events and by the wall."""
        torch.cuda.synchronize()
        took: list[float] = []

        def then(seconds: float, error: BaseException | None) -> None:
            assert error is None, error
            took.append(seconds)

        started = time.perf_counter()
        copy = (self.engine.load if load else self.engine.store)(fragments, then)
        self.engine.wait([copy])
        return took[0], time.perf_counter() - started

    def large(self, rig: Rig, load: bool) -> tuple[float, float]:
        """The same for one large copy."""
        stream = self.streams[0]
        return _timed(stream, lambda: self._queue_large(rig, 0, load, stream))

    def _queue_large(self, rig: Rig, offset: int, load: bool, stream: torch.cuda.Stream) -> None:
        for start in range(0, rig.size_bytes, CHUNK_BYTES):
            ends = (rig.large.data_ptr() + start, self.arena.address + offset + start)
            dst, src = ends if load else ends[::-1]
            self.runtime.copy(dst, src, min(CHUNK_BYTES, rig.size_bytes - start), stream.cuda_stream)

    # -- rows ----------------------------------------------------------------------------------------------------------

    def fragments(self, page: int, count: int, goal: float, load: bool, order: str = "random") -> None:
        """One page size, one direction: ours, the limit, vLLM's ways."""
        rig = Rig(self.arena, page, count, order=order)
        cases: dict[str, Callable[[], tuple[float, float]]] = {
            "limit": lambda: self.large(rig, load),
            "kvstore": lambda: self.job(rig.fragments, load),
        }
        if self.vllm is not None:
            stream = self.streams[1]
            for name, queue in self.vllm.ways(rig.fragments, load, page).items():

                def other(queue: Callable[[], None] = queue) -> tuple[float, float]:
                    with torch.cuda.stream(stream):
                        return _timed(stream, queue)

                cases[name] = other
        walls: dict[str, list[float]] = {name: [] for name in cases}

        def on_events(name: str, case: Callable[[], tuple[float, float]]) -> Callable[[], float]:
            def run() -> float:
                seconds, wall = case()
                walls[name].append(wall)
                return seconds

            return run

        took = in_turn({name: on_events(name, case) for name, case in cases.items()}, self.rounds)
        share = Ratio.of(took["limit"], took["kvstore"])
        wall = Ratio.of(walls["limit"][1:], walls["kvstore"][1:])
        name = f"{page >> 10} KiB {'to GPU' if load else 'to host'}" + (f", {order}" if order != "random" else "")
        rates = {case: rig.size_bytes / statistics.median(each) / 1e9 for case, each in took.items()}
        figures: dict[str, Any] = {"share": share.as_json(), "wall": wall.as_json(), "GB_s": rates}
        goals = [self.report.goal(name, share.median, at_least=goal)]
        beside = ""
        for case in cases:
            if case.startswith("vLLM"):
                ratio = Ratio.of(took[case], took["kvstore"])
                figures[case] = ratio.as_json()
                beside += f"{case[5:]} {ratio.median:.2f}x "
        if beside:
            assert self.vllm is not None
            slowest = min(figures[case][0] for case in cases if case.startswith("vLLM"))
            goals.append(self.report.goal(f"{name} beside vLLM", round(slowest, 2), at_least=1.0))
            if load and page == 64 << 10 and order == "random":
                taken = round(figures[self.vllm.takes(page)][0], 2)
                goals.append(self.report.goal(f"{name} beside what vLLM takes", taken, at_least=_FASTER_THAN_VLLM))
        self.report.figures[name] = figures
        self.report.rows.append(
            (
                name,
                f"{rates['kvstore']:.1f}",
                f"{rates['limit']:.1f}",
                str(share),
                f"{wall.median:.2f}",
                beside or "-",
                "; ".join(goals),
            )
        )

    def both(self, page: int, count: int) -> None:
        """Both directions at once, against two large copies at once."""
        rigs = [Rig(self.arena, page, count, seed=seed) for seed in (0, 1)]
        half = self.arena.size_bytes // 2 // CHUNK_BYTES * CHUNK_BYTES
        up, down = self.streams

        def large() -> float:
            torch.cuda.synchronize()
            started = time.perf_counter()
            self._queue_large(rigs[0], 0, True, up)
            self._queue_large(rigs[1], half, False, down)
            torch.cuda.synchronize()
            return time.perf_counter() - started

        def ours(*handed_in: str) -> float:
            begin = {"load": self.engine.load, "store": self.engine.store}
            torch.cuda.synchronize()
            started = time.perf_counter()
            jobs = [begin[each](rigs[each == "store"].fragments, _must) for each in handed_in]
            self.engine.wait(jobs)
            return time.perf_counter() - started

        orders = {"load first": ("load", "store"), "store first": ("store", "load")}
        cases: dict[str, Callable[[], float]] = {"limit": large}
        for name, order in orders.items():
            cases[name] = functools.partial(ours, *order)
        took = in_turn(cases, self.rounds)
        rates = {case: 2 * rigs[0].size_bytes / statistics.median(each) / 1e9 for case, each in took.items()}
        for name in orders:
            share = Ratio.of(took["limit"], took[name])
            case = f"both directions, {name}"
            self.report.figures[case] = {"share": share.as_json(), "GB_s": [rates[name], rates["limit"]]}
            self.report.rows.append(
                (
                    f"{case}, wall",
                    f"{rates[name]:.1f}",
                    f"{rates['limit']:.1f}",
                    str(share),
                    "",
                    "-",
                    self.report.goal(case, share.median, at_least=_BOTH_SHARE),
                )
            )

    def one_block(self, repeats: int) -> None:
        """Acquire, load and release of one block of 8 MiB."""
        reservation = self.client.reserve(8)
        keys = [bytes([index]) * 32 for index in range(8)]
        self.client.commit(reservation.generation, reservation.offsets, keys, epochs=reservation.epochs)
        page = _BLOCK_BYTES // _LAYERS // _BLOCKS_PER_SLOT
        rig = Rig(self.arena, page, _LAYERS * _BLOCKS_PER_SLOT)
        kv, size = rig.fragments.kv, rig.fragments.size
        place = np.arange(len(size), dtype=np.uint64) * np.uint64(page)
        rng = random.Random(0)
        steps: dict[str, list[float]] = {"acquire": [], "load": [], "release": [], "all": []}
        for index in range(repeats + 20):
            torch.cuda.synchronize()
            at = [time.perf_counter()]
            lease = self.client.acquire([(0, [rng.choice(keys)])])[0]
            at.append(time.perf_counter())
            pool = place + np.uint64(self.arena.address) + lease.offsets[0]
            self.engine.wait([self.engine.load(Fragments(kv, pool, size), _must)])
            assert np.array_equal(self.arena.epochs_of(lease.offsets), lease.epochs)
            at.append(time.perf_counter())
            self.client.release([lease], wait=False)
            at.append(time.perf_counter())
            if index >= 20:
                for name, begun, ended in zip(steps, at[:-1], at[1:], strict=False):
                    steps[name].append(ended - begun)
                steps["all"].append(at[-1] - at[0])
        p50 = {name: statistics.median(each) * 1e6 for name, each in steps.items()}
        p99 = statistics.quantiles(steps["all"], n=100)[98] * 1e6
        self.report.figures["one block"] = {"p50_us": p50, "p99_us": p99}
        goal = self.report.goal("one block, us", p50["all"], at_most=_BLOCK_P50_US)
        parts = ", ".join(f"{name} {p50[name]:.0f}" for name in ("acquire", "load", "release"))
        self.report.rows.append(("one 8 MiB block, us", f"{p50['all']:.0f}", "", f"p99 {p99:.0f}", "", parts, goal))

    def disturbance(self, page: int, count: int) -> None:
        """A large bf16 matrix product while blocks stream both ways."""
        rigs = [Rig(self.arena, page, count, seed=seed) for seed in (0, 1)]
        a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        out = torch.empty_like(a)
        products = 60

        compute = torch.cuda.Stream()

        moved: list[float] = []

        def pair() -> list[Any]:
            """As in an engine's step: handed in while the model's kernels are queued."""
            return [
                self.engine.load(rigs[0].fragments, _must, beside_compute=True),
                self.engine.store(rigs[1].fragments, _must, beside_compute=True),
            ]

        def run(stream: bool) -> float:
            """The jobs are handed in on a stream that is idle, so that they do not wait for the products. These are all
            queued before the first of them begins.
            """
            torch.cuda.synchronize()
            begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            with torch.cuda.stream(compute):
                torch.cuda._sleep(20_000_000)  # about 10 ms
                begun.record()
                for _ in range(products):
                    torch.mm(a, b, out=out)
                ended.record()
            before = sum(self.engine.stats().bytes_by_path.values())
            jobs = pair() if stream else []
            while stream and not ended.query():
                self.engine.poll()
                if sum(not job.over for job in jobs) < 4:
                    jobs += pair()
            ended.synchronize()
            assert not stream or not jobs[-1].over, "the copies ended before the products"
            started = time.perf_counter()
            self.engine.wait(jobs)
            seconds = begun.elapsed_time(ended) / 1e3
            if stream:
                total = sum(self.engine.stats().bytes_by_path.values()) - before
                moved.append(total / (seconds + 0.01 + time.perf_counter() - started) / 1e9)
            return seconds

        took = in_turn({"alone": lambda: run(False), "streaming": lambda: run(True)}, self.rounds)
        slower = Ratio.of(took["streaming"], took["alone"])
        flops = products * 2 * 8192**3
        rates = {case: flops / statistics.median(each) / 1e12 for case, each in took.items()}
        self.report.figures["disturbance"] = {"slower": slower.as_json(), "TFLOP_s": rates}
        goal = self.report.goal("disturbance", round(slower.median - 1, 4), at_most=_DISTURBANCE)
        self.report.rows.append(
            (
                "bf16 product while streaming, TFLOP/s",
                f"{rates['streaming']:.0f}",
                f"{rates['alone']:.0f}",
                f"{slower.median - 1:+.1%}",
                "",
                f"{statistics.median(moved):.0f} GB/s moved",
                goal,
            )
        )


def _must(_seconds: float, error: BaseException | None) -> None:
    assert error is None, error


class Vllm:
    """vLLM's own ways to move fragments, as its OffloadingConnector calls them."""

    def __init__(self) -> None:
        from vllm import _custom_ops
        from vllm.v1.kv_offload.cpu import swap_blocks_triton

        self._ops = _custom_ops
        self._triton = swap_blocks_triton

    def takes(self, page: int) -> str:
        """The way that it takes towards the GPU for pages of this size."""
        return "vLLM kernel" if page < self._triton.THRESHOLD_BYTES else "vLLM batch"

    def ways(self, fragments: Fragments, load: bool, page: int) -> dict[str, Callable[[], None]]:
        """Name -> what queues the copies on the current stream."""
        kv, pool, size = (
            torch.from_numpy(array.astype(np.int64)).pin_memory()
            for array in (fragments.kv, fragments.pool, fragments.size)
        )
        src, dst = (pool, kv) if load else (kv, pool)

        def batch() -> None:
            self._ops.swap_blocks_batch(src, dst, size, is_src_access_order_any=load)

        def kernel() -> None:
            self._triton.swap_blocks_batch(src, dst, size, bytes_per_chunk=min(page, 8192))

        return {"vLLM batch": batch, "vLLM kernel": kernel}


@contextlib.contextmanager
def _benched(pool_bytes: int, rounds: int, report: Report, vllm: Vllm | None) -> Iterator[Bench]:
    with running_daemon(pool_bytes) as daemon:
        namespace = kvstore.Namespace(model="bench", dtype="bfloat16", block_size=64, block_bytes=_BLOCK_BYTES)
        with kvstore.connect(daemon.endpoint, namespace) as client:
            bench = Bench(client, rounds, report, vllm)
            try:
                yield bench
            finally:
                bench.engine.close()


@click.command()
@click.option("--smoke", is_flag=True, help="A small size, to see that it runs.")
@click.option("--no-vllm", is_flag=True, help="Leave vLLM's own ways out, also where vLLM is installed.")
def main(smoke: bool, no_vllm: bool) -> None:
    """Copies between GPU memory and the pool."""
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device")
    report = Report("gpu", ("case", "GB/s", "limit", "share of limit", "wall", "faster than vLLM's", "goal"))
    vllm = None
    if not no_vllm:
        try:
            vllm = Vllm()
        except ImportError as error:
            report.notes.append(f"vLLM's own ways are left out: {error}")
    scale, rounds = (64, 2) if smoke else (1, 15)
    with _benched((512 << 20) if smoke else (6 << 30), rounds, report, vllm) as bench:
        for page, count, to_host, to_gpu in _CASES:
            count = max(_LAYERS * _BLOCKS_PER_SLOT, count // scale)
            bench.fragments(page, count, to_host, load=False)
            bench.fragments(page, count, to_gpu, load=True)
            if page == 64 << 10:
                for order in ("consecutive", "runs of 4"):
                    bench.fragments(page, count, to_gpu, load=True, order=order)
                bench.both(page, count)
                if not smoke:
                    bench.disturbance(page, count)
        bench.one_block(20 if smoke else 300)
    facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
    report.show(facts)


if __name__ == "__main__":
    main()
