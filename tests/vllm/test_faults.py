"""Pressure and faults under traffic: preemption, the daemon killed in the middle of loads, blocks with one taker."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tests.vllm.harness import BLOCK_TOKENS, BLOCKS, Daemon, Engine, prompt, wait_until

SEQUENCES = 8
REQUESTS = 50
REQUEST_BLOCKS = 4


def test_preempted_sequences_give_the_tokens_of_a_run_without_the_plugin(
    daemon: Daemon, engines: Callable[..., Engine]
) -> None:
    pressed = {"num_gpu_blocks_override": 64, "max_model_len": 1024}
    plain = engines("pressed-plain", None, **pressed)
    tight = engines("pressed", {"kvstore.endpoint": daemon.endpoint, "offload_prompt_only": False}, **pressed).ready()
    plain.ready()
    prompts = [prompt(200 + number, 400) for number in range(SEQUENCES)]  # 7 blocks each, and 10 at the end
    wanted = [output["tokens"] for output in plain.generate(*prompts, max_tokens=200)]
    tight.wait_storing(daemon)
    for _ in range(2):  # computed and stored, then loaded
        assert [output["tokens"] for output in tight.generate(*prompts, max_tokens=200)] == wanted
        tight.forget_local()
    assert tight.metric("vllm:num_preemptions") > 0
    assert tight.metric("vllm:kvstore_hit_blocks") > 0
    assert tight.metric("vllm:kvstore_hook_errors") == 0
    wait_until("nothing is held", lambda: daemon.stats()["leases"] == daemon.stats()["pins"] == 0)
    tight.stop()
    plain.stop()


def test_a_daemon_killed_during_loads_costs_no_answer(daemon: Daemon, engines: Callable[..., Engine]) -> None:
    # Few at a time, so that loads go on all the while.
    extra = {"kvstore.endpoint": daemon.endpoint, "kvstore.verdict_deadline_s": 1, "kvstore.timeout_s": 1}
    engine = engines("traffic", extra, max_num_seqs=4).ready()
    engine.wait_storing(daemon)
    prompts = [prompt(300 + number, REQUEST_BLOCKS * BLOCK_TOKENS + 9) for number in range(REQUESTS)]
    before = daemon.stored_blocks()
    wanted = [output["tokens"] for output in engine.generate(*prompts)]
    daemon.wait_stored(before + REQUESTS * REQUEST_BLOCKS)
    for already in (10, 60):  # blocks that are loaded when the daemon dies
        engine.forget_local()
        hits = daemon.stats()["hits"].get("cpu", 0)
        killed = threading.Event()

        def kill(hits: int = hits, already: int = already, killed: threading.Event = killed) -> None:
            wait_until("loads are going on", lambda: daemon.stats()["hits"].get("cpu", 0) >= hits + already, 60)
            daemon.kill()
            killed.set()
            daemon.start()

        killer = threading.Thread(target=kill)
        killer.start()
        outputs = engine.generate(*prompts)
        assert killed.is_set(), "the daemon was to die while requests were under way"
        killer.join(60)
        assert [output["tokens"] for output in outputs] == wanted
        loaded = [output["cached"] > 0 for output in outputs]
        assert any(loaded) and not all(loaded)
        engine.wait_storing(daemon)
        engine.forget_local()
        assert [output["tokens"] for output in engine.generate(*prompts)] == wanted
        daemon.wait_stored(REQUESTS * REQUEST_BLOCKS)
    assert engine.metric("vllm:kvstore_hook_errors") == 0
    wait_until("nothing is held", lambda: daemon.stats()["leases"] == daemon.stats()["pins"] == 0)


def test_exactly_one_taker_and_then_they_are_gone(
    daemon: Daemon, engines: Callable[..., Engine], answers: Callable[[list[int]], list[int]]
) -> None:
    extra = {"kvstore.endpoint": daemon.endpoint, "kvstore.load_policy": "auto"}
    taker = engines("taker", {**extra, "kvstore.drop_on_load": True}, role="kv_consumer")
    prefill = engines("prefill", extra, role="kv_producer").ready()
    taker.ready()
    prefill.wait_storing(daemon)
    before = daemon.stored_blocks()
    prefill.generate(prompt(400), max_tokens=1)
    daemon.wait_stored(before + BLOCKS)

    def loaded() -> bool:  # the workers have mapped the pool
        taker.forget_local()
        return bool(taker.generate(prompt(400), max_tokens=1)[0]["cached"])

    wait_until("the taker has loaded", loaded)
    wait_until("its blocks are gone", lambda: daemon.stored_blocks() == before)
    taker.forget_local()
    again = taker.generate(prompt(400))[0]
    assert again["cached"] == 0
    assert again["tokens"] == answers(prompt(400))
    assert taker.metrics()["vllm:kvstore_load_decisions{decision=load}"] >= 1
    assert taker.metric("vllm:kvstore_hit_blocks") == BLOCKS
    for engine in (prefill, taker):
        assert engine.metric("vllm:kvstore_hook_errors") == 0
    wait_until("nothing is held", lambda: daemon.stats()["leases"] == daemon.stats()["pins"] == 0)
