"""What the vLLM plugin costs an engine: its scheduler thread for lookups, its steps while a request waits, and a load.

Needs vLLM: `.venv-vllm/bin/python -m bench.plugin`, in what `make test-vllm` installs. Three parts:

    lookup      The manager's share of the scheduler thread (processor time) for requests of 2,048 keys that are all
                there: both rounds of lookups, what a step's end ships, the answer, the load's plan and its end, per
                lookup. Beside it the same loop over a manager that only says hit. The daemon is in memory and answers
                outside the clock.
    waiting     Steps that an engine with nothing else to do makes in a second while 64 requests of 2,048 keys wait for
                a daemon that is silent, lookups in each, and the share of a core that this takes.
    load        A real engine and a real daemon: time to the first token of 4,000 tokens that are loaded, less that of a
                hit in the engine's own cache, which is what the engine takes anyway, and less one more step of the
                engine (as long as one of decoding), since a load and its request are in different steps; against a
                memcpy of the same bytes.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import click
import numpy as np

from bench.harness import Report, in_turn, private_memory, seconds
from tests.plugin.fakes import SLOT_BYTES, FakeClient, FakeDaemon, FakeLease

KEYS: Final = 2048
LOOKUP_GOAL_US: Final = 2.0
#: Lookups that a step makes for a request that waits.
LOOKUPS_PER_STEP_GOAL: Final = 2
#: One step in about GIVE_WAY_S.
STEPS_GOAL: Final = 250
LOAD_GOAL: Final = 1.5
LOAD_TOKENS: Final = 4000


def chain_of(seed: int, count: int) -> list[Any]:
    """An engine's keys of a prefix."""
    numbers = random.Random(seed)
    return [numbers.randbytes(32) + bytes(4) for _ in range(count)]


class Rig:
    """A manager with a daemon in memory. `threaded`: with its link's own thread."""

    def __init__(self, keys: list[Any], client: Callable[[FakeDaemon], Any], threaded: bool) -> None:
        from engine_plugin.vllm.layout import DIRECT, SlotFormat
        from engine_plugin.vllm.link import DaemonLink
        from engine_plugin.vllm.manager import KVStoreManager
        from engine_plugin.vllm.messages import WorkerReport
        from engine_plugin.vllm.pd import PrefillDecode, Side
        from engine_plugin.vllm.worth import Block

        daemon = FakeDaemon(len(keys))
        setup = FakeClient(daemon)
        slots = setup.reserve(len(keys))
        setup.commit(slots.generation, slots.offsets, [key[:-4] for key in keys], epochs=slots.epochs)
        self.link = DaemonLink(client(daemon), stock_max=0, threaded=threaded)
        side = Side(digest="", model="", block_tokens=16, wait_s=1.0)
        self.manager = KVStoreManager(
            self.link,
            slot_format=SlotFormat(DIRECT, 1, 64, 1),
            workers=1,
            blocks={0: Block(16, SLOT_BYTES)},
            windowed={},
            deadline_s=3600.0,
            pd=PrefillDecode(side, now=time.monotonic),
        )
        self.manager.on_report(WorkerReport(attached={0: daemon.arena.generation}))


def request(name: str) -> Any:
    from vllm.v1.kv_offload.base import ReqContext

    return ReqContext(req_id=name)


def ask(manager: Any, keys: list[Any], context: Any) -> int:
    """What vLLM's scheduler does with a prefix: on past a retry, up to a miss. Returns how many lookups it took."""
    from vllm.v1.kv_offload.base import LookupResult

    for count, key in enumerate(keys, 1):
        if manager.lookup(key, context) is LookupResult.MISS:
            return count
    return len(keys)


def thread_seconds(call: Callable[[], object]) -> float:
    """Processor time of this thread."""
    began = time.thread_time()
    call()
    return time.thread_time() - began


def measure_lookups(report: Report, rounds: int) -> None:
    from vllm.v1.kv_offload.base import LookupResult, ScheduleEndContext

    keys = chain_of(1, KEYS)
    rig = Rig(keys, FakeClient, threaded=False)
    manager, link = rig.manager, rig.link
    names = iter(range(1_000_000))
    no_requests = ScheduleEndContext(new_req_ids=[], preempted_req_ids=())

    class Bare:
        def lookup(self, _key: Any, _context: Any) -> LookupResult:
            return LookupResult.HIT

    bare = Bare()

    def whole_request() -> float:
        context = request(f"request {next(names)}")
        manager.on_new_request(context)

        def first() -> None:
            ask(manager, keys, context)
            manager.on_schedule_end(no_requests)

        def second() -> None:
            assert ask(manager, keys, context) == KEYS
            manager.prepare_load(keys, context)
            manager.on_schedule_end(no_requests)
            manager.complete_load(set(keys), context)
            manager.on_request_finished(context)

        taken = thread_seconds(first)
        link.turn()
        taken += thread_seconds(second)
        link.turn()
        return taken / (2 * KEYS)

    def nothing() -> float:
        return thread_seconds(lambda: [ask(bare, keys, None) for _ in range(2)]) / (2 * KEYS)

    taken = in_turn({"plugin": whole_request, "bare": nothing}, rounds)
    plugin_us, bare_us = (statistics.median(taken[name]) * 1e6 for name in ("plugin", "bare"))
    goal = report.goal("lookup_us", plugin_us, at_most=LOOKUP_GOAL_US)
    report.rows.append(("one of 2,048 lookups, everything included", f"{plugin_us:.2f} us", goal))
    report.rows.append(("the same loop over a manager that says hit", f"{bare_us:.2f} us", ""))
    report.figures["lookup"] = {"plugin_us": round(plugin_us, 3), "bare_us": round(bare_us, 3)}
    link.close()


class SilentClient(FakeClient):
    """Takes calls and does not answer until it is told to."""

    def __init__(self, daemon: FakeDaemon) -> None:
        super().__init__(daemon)
        self.answer = threading.Event()

    def acquire(self, queries: Any, *, extents_min: Sequence[int] = ()) -> list[FakeLease]:
        self.answer.wait(60)
        return super().acquire(queries, extents_min=extents_min)


def measure_waiting(report: Report, for_s: float) -> None:
    from vllm.v1.kv_offload.base import ScheduleEndContext

    clients: list[SilentClient] = []

    def client(daemon: FakeDaemon) -> SilentClient:
        clients.append(SilentClient(daemon))
        return clients[-1]

    keys = chain_of(2, KEYS)
    rig = Rig(keys, client, threaded=True)
    contexts = [request(f"request {number}") for number in range(64)]
    for context in contexts:
        rig.manager.on_new_request(context)
    no_requests = ScheduleEndContext(new_req_ids=[], preempted_req_ids=())

    def step() -> int:
        lookups = sum(ask(rig.manager, keys, context) for context in contexts)
        rig.manager.on_schedule_end(no_requests)
        rig.manager.give_way()  # the connector does so where a step has nothing to compute
        return lookups

    step()  # gathers
    began, cpu, steps, lookups = time.monotonic(), time.thread_time(), 0, 0
    while time.monotonic() - began < for_s:
        lookups += step()
        steps += 1
    took, cpu = time.monotonic() - began, time.thread_time() - cpu
    clients[0].answer.set()
    for context in contexts:
        rig.manager.on_request_finished(context)
    rig.link.close()
    per_step = lookups / steps / len(contexts)
    figures = {"steps_per_s": steps / took, "lookups_per_step": per_step, "core": cpu / took}
    report.figures["waiting"] = {name: round(value, 3) for name, value in figures.items()}
    goal = report.goal("steps_per_s", figures["steps_per_s"], at_most=STEPS_GOAL)
    report.rows.append(("steps in a second while 64 requests wait", f"{figures['steps_per_s']:.0f}", goal))
    goal = report.goal("lookups_per_step", per_step, at_most=LOOKUPS_PER_STEP_GOAL)
    report.rows.append(("lookups in each, per request of 2,048 keys", f"{per_step:.1f}", goal))
    report.rows.append(("share of a core", f"{figures['core']:.1%}", ""))


def measure_load(report: Report, rounds: int) -> None:
    from tests.vllm.harness import BLOCK_BYTES, BLOCK_TOKENS, HERE, Daemon, Engine, prompt

    blocks = LOAD_TOKENS // BLOCK_TOKENS
    size = blocks * BLOCK_BYTES
    source, target = private_memory(size), private_memory(size)
    source[:] = 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([sys.executable, str(HERE / "tiny_llama.py"), name + "/model"], check=True, capture_output=True)
        daemon = Daemon(folder)
        daemon.start()
        engine = Engine(folder / "model", folder, "engine", {"kvstore.endpoint": daemon.endpoint})
        try:
            engine.ready()
            engine.wait_storing(daemon)
            tokens = prompt(1, LOAD_TOKENS)
            before = daemon.stored_blocks()
            engine.generate(tokens, max_tokens=1)
            daemon.wait_stored(before + blocks)

            def hit() -> float:
                return float(engine.generate(tokens, max_tokens=1)[0]["ttft_s"])

            def loaded() -> float:
                engine.forget_local()
                output = engine.generate(tokens, max_tokens=1)[0]
                assert output["cached"] >= (blocks - 1) * BLOCK_TOKENS, output
                return float(output["ttft_s"])

            def step() -> float:
                few, many = (
                    seconds(lambda count=count: engine.generate(tokens, max_tokens=count)) for count in (1, 17)
                )
                return (many - few) / 16

            def copied() -> float:
                return seconds(lambda: np.copyto(target, source))

            hit()
            taken: dict[str, list[float]] = {"loaded": [], "hit": [], "step": [], "memcpy": []}
            for _ in range(rounds):  # a hit needs what the load before it has brought
                taken["loaded"].append(loaded())
                taken["hit"].append(hit())
                taken["step"].append(step())
                taken["memcpy"].append(copied())
        finally:
            engine.stop()
            daemon.stop()
    loaded_s, hit_s, step_s, memcpy_s = (statistics.median(each) for each in taken.values())
    ratio = statistics.median((load - hit - step) / copy for load, hit, step, copy in zip(*taken.values(), strict=True))
    report.figures["load"] = {
        "bytes": size,
        "loaded_s": round(loaded_s, 4),
        "hit_s": round(hit_s, 4),
        "step_s": round(step_s, 4),
        "memcpy_s": round(memcpy_s, 4),
        "ratio": round(ratio, 3),
    }
    report.rows.append((f"first token of {LOAD_TOKENS} tokens, loaded", f"{loaded_s * 1e3:.1f} ms", ""))
    report.rows.append(("the same from the engine's own cache", f"{hit_s * 1e3:.1f} ms", ""))
    report.rows.append(("a step of the engine", f"{step_s * 1e3:.1f} ms", ""))
    report.rows.append((f"memcpy of {size >> 20} MiB", f"{memcpy_s * 1e3:.1f} ms", ""))
    goal = report.goal("load_ratio", ratio, at_most=LOAD_GOAL)
    report.rows.append(("what the load adds beyond one step, in memcpys", f"{ratio:.2f}", goal))


@click.command()
@click.option("--smoke", is_flag=True, help="Smallest sizes, without an engine: whether the bench works.")
def main(smoke: bool) -> None:
    """Costs of the vLLM plugin; see the module."""
    report = Report("plugin", ("", "", "goal"))
    measure_lookups(report, rounds=3 if smoke else 200)
    measure_waiting(report, for_s=0.2 if smoke else 5.0)
    if not smoke:
        measure_load(report, rounds=15)
    report.show()


if __name__ == "__main__":
    main()
