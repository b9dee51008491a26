"""The plugin inside vLLM's own scheduler, with fakes of everything else (see scheduler_rig)."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from engine_plugin.vllm.announced import ASK_EVERY_S
from tests.plugin.fakes import FakeDaemon
from tests.vllm.scheduler_rig import BLOCK_TOKENS, SchedulerRig

pytestmark = pytest.mark.filterwarnings("ignore")
Rigs = Callable[..., SchedulerRig]
BLOCKS = 6


@pytest.fixture
def daemon() -> FakeDaemon:
    return FakeDaemon(64)


@pytest.fixture
def rigs(model: Path, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rigs]:
    made: list[SchedulerRig] = []

    def make(**options: Any) -> SchedulerRig:
        made.append(SchedulerRig(monkeypatch, model, daemon, **options))
        return made[-1]

    yield make
    for rig in made:
        rig.close()
    daemon.check()
    assert not daemon.leases
    assert not daemon.claims
    assert not daemon.reserved


def tokens(seed: int, blocks: int = BLOCKS) -> list[int]:
    return random.Random(seed).choices(range(2, 1000), k=blocks * BLOCK_TOKENS + 5)


def test_one_engine_stores_and_another_loads(rigs: Rigs, daemon: FakeDaemon) -> None:
    prefill, decode = rigs(role="kv_producer"), rigs(role="kv_consumer")
    computed = prefill.answer("p", tokens(1))
    assert len(daemon.blocks) == BLOCKS
    assert decode.answer("d", tokens(1)) == computed
    assert decode.counts["hit_blocks"] == BLOCKS
    assert prefill.counts["stored_blocks/stored"] == BLOCKS
    prefill.answer("p2", tokens(2))
    assert prefill.counts.get("hit_blocks", 0) == 0
    assert decode.counts.get("stored_blocks/stored", 0) == 0


def test_a_store_is_published_when_its_copy_ends_and_not_at_the_end_of_a_step(rigs: Rigs, daemon: FakeDaemon) -> None:
    one = rigs(acks=True)
    one.add("busy", tokens(1, 2))
    while not one.copies.end_one(False):
        one.step()

    one.copies.poll()
    pause = threading.Event()
    for _ in range(3000):  # no step is made meanwhile; the clock stands still in these tests
        one.link.turn()
        if len(daemon.blocks) == 2 or pause.wait(0.01):
            break
    assert len(daemon.blocks) == 2
    one.settle()
    assert one.counts["stored_blocks/stored"] == 2


def loading(rigs: Rigs) -> tuple[SchedulerRig, list[int]]:
    """An engine whose steps overlap, with a load of the request "again" under way, and the answer that is right."""
    one = rigs(overlap=True)
    one.answer("first", tokens(2))  # by then the scheduler knows that its worker is attached
    answer = one.answer("p", tokens(1))
    assert one.reset(connector=False)
    one.add("again", tokens(1))
    for _ in range(9):
        one.step()
    assert one.copies.queues[True]
    return one, answer


@pytest.mark.parametrize("near", [True, False])
def test_of_a_load_that_has_ended_the_scheduler_hears_at_once_where_its_worker_is_near(
    rigs: Rigs, monkeypatch: pytest.MonkeyPatch, near: bool
) -> None:
    from engine_plugin.vllm import nearby

    if not near:
        monkeypatch.setattr(nearby, "only_worker", lambda _engine_id: None)
    one, answer = loading(rigs)
    assert not any(one.step() for _ in range(5))
    one.copies.end_one(True)
    # Without: the step that sees it, and the one after which its result is read.
    assert next(count for count in range(5) if one.step()) == (1 if near else 2)
    one.settle()
    assert one.outputs["again"] == answer and one.counts["hit_blocks"] == BLOCKS
    assert not one.manager._copies_s


@pytest.mark.parametrize("near", [True, False])
def test_vllms_loop_does_not_pause_after_the_end_of_a_load(
    rigs: Rigs, monkeypatch: pytest.MonkeyPatch, near: bool
) -> None:
    from vllm.v1.engine import core

    from engine_plugin.vllm import nearby

    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(core, "time", time)
    if not near:
        monkeypatch.setattr(nearby, "only_worker", lambda _engine_id: None)
    one, _ = loading(rigs)
    loop = mock.Mock()
    loop.step_fn.return_value = None, False

    core.EngineCoreProc._process_engine_step(loop)
    assert slept == [0.001]
    one.copies.end_one(True)
    one.step()
    core.EngineCoreProc._process_engine_step(loop)
    core.EngineCoreProc._process_engine_step(loop)
    assert slept == [0.001, 0 if near else 0.001, 0.001]


def test_a_worker_that_is_near_reads_before_vllm_has_found_memory_for_a_load(
    rigs: Rigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    from engine_plugin.vllm.worker import KVStoreWorker

    happened: list[Any] = []
    allocate = KVCacheManager.allocate_slots

    def allocated(self: Any, *args: Any, **kwargs: Any) -> Any:
        happened.append("memory")
        return allocate(self, *args, **kwargs)

    monkeypatch.setattr(KVStoreWorker, "expect_load", lambda _self, spec: happened.append(spec))
    monkeypatch.setattr(KVCacheManager, "allocate_slots", allocated)
    one, answer = loading(rigs)
    specs = [each for each in happened if each != "memory"]
    assert [spec.req_id for spec in specs] == ["again"] and happened[-2:] == [specs[0], "memory"]
    assert len(specs[0].offsets) == BLOCKS and specs[0].generation
    one.copies.end_one(True)
    one.settle()
    assert one.outputs["again"] == answer

    happened.clear()
    assert one.reset(connector=False)
    for name in ("a", "b"):  # of two loads one is read first, and nobody knows which
        one.add(name, tokens(1))
    one.settle()
    assert set(happened) == {"memory"}


def test_a_load_that_has_failed_is_told_of_with_a_step(rigs: Rigs) -> None:
    one, answer = loading(rigs)
    one.copies.fail_next = 1
    one.copies.end_one(True)
    one.settle()
    assert one.outputs["again"] == answer and one.failed_loads == 1


def test_the_last_block_of_a_draft_models_prefix_is_computed(rigs: Rigs, daemon: FakeDaemon) -> None:
    """A draft model's KV of a token depends on the next one. vLLM leaves a prefix' last block out; the others are the
    plugin's as ever.
    """
    one, other = rigs(draft=True), rigs(draft=True)
    computed = one.answer("p", tokens(1))
    assert len(daemon.blocks) == BLOCKS
    assert other.answer("d", tokens(1)) == computed
    assert other.counts["vllm:kv_offload_load_bytes"] == (BLOCKS - 1) * 64
    one.answer("long", tokens(2), max_tokens=80)
    one.reset(connector=False)
    one.answer("again", tokens(2))
    assert one.counts["vllm:kv_offload_load_bytes"] == (BLOCKS - 1) * 64


class Looked(Exception):
    pass


@pytest.mark.parametrize("lockstep", [False, True])
def test_what_is_sent_to_an_engine_is_found_in_its_loop(lockstep: bool) -> None:
    from vllm.v1.engine import core

    from engine_plugin.vllm.callers import engine_queue

    found: list[Any] = []

    def step() -> None:
        found.append(engine_queue())
        raise Looked

    kind = core.DPEngineCoreProc if lockstep else core.EngineCoreProc
    engine = kind.__new__(kind)
    engine.input_queue, engine.step_fn = queue.Queue(), step
    assert engine_queue() is None
    with pytest.raises(Looked):
        engine._process_engine_step()
    assert found == [None if lockstep else engine.input_queue]


def test_an_engine_with_one_request_loads_in_the_step_that_asks(
    rigs: Rigs, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = rigs()
    computed = one.answer("stored", tokens(1))
    one.settle()
    one.reset(connector=False)

    def answer_comes(_timeout_s: float) -> bool:
        one.link.turn()
        return bool(one.link._answered.is_set())

    monkeypatch.setattr(one.link, "wait_answer", answer_comes)
    one.add("alone", tokens(1))
    one.step()
    assert len(one.copies.queues[True]) == 1, "the load was not begun in the first step"
    while not one.copies.end_one(True):
        one.step()
    assert one.answer("again", tokens(1)) == computed
    one.settle()
    assert one.counts["hit_blocks"] >= BLOCKS


def test_limits_of_a_request(rigs: Rigs, daemon: FakeDaemon) -> None:
    one = rigs()
    one.answer("stored", tokens(1), params={"max_offload_tokens": 4 * BLOCK_TOKENS})
    assert len(daemon.blocks) == 4
    one.reset(connector=False)
    one.answer("limited", tokens(1), params={"max_load_tokens": 2 * BLOCK_TOKENS, "max_offload_tokens": 0})
    assert one.counts["vllm:kv_offload_load_bytes"] == 2 * 64
    one.reset(connector=False)
    one.answer("nothing", tokens(1), params={"kv_load_tiers": []})
    assert one.counts["vllm:kv_offload_load_bytes"] == 2 * 64


def test_a_request_may_exclude_what_is_on_disk(rigs: Rigs, daemon: FakeDaemon) -> None:
    one = rigs(role="kv_consumer")
    rigs(role="kv_producer").answer("stored", tokens(1))
    for key in list(daemon.blocks)[2:]:
        daemon.copy_down(key)
        daemon.evict(key)
    one.answer("pool", tokens(1), params={"kv_load_tiers": [{"medium": "CPU"}]})
    assert one.counts["hit_blocks"] == 2
    assert one.counts["miss_blocks/not_allowed"] == BLOCKS - 2


def test_generated_tokens_are_stored_where_that_is_asked_for(rigs: Rigs, daemon: FakeDaemon) -> None:
    one = rigs(extra={"offload_prompt_only": False})
    answer = one.answer("first", tokens(1), max_tokens=2 * BLOCK_TOKENS)
    assert len(daemon.blocks) == BLOCKS + 2
    one.reset(connector=False)
    one.answer("second turn", tokens(1) + answer)
    assert one.counts["hit_blocks"] == BLOCKS + 2


def test_store_threshold(rigs: Rigs, daemon: FakeDaemon) -> None:
    one = rigs(extra={"store_threshold": 2})
    one.answer("first", tokens(1))
    assert not daemon.blocks
    one.answer("second", tokens(1))
    assert len(daemon.blocks) == BLOCKS
    assert one.counts["store_skipped_blocks/threshold"] == BLOCKS


def test_blocks_for_one_taker(rigs: Rigs, daemon: FakeDaemon) -> None:
    prefill = rigs(role="kv_producer")
    takers = [rigs(role="kv_consumer", extra={"kvstore.drop_on_load": True}) for _ in range(2)]
    computed = prefill.answer("p", tokens(1))
    for taker in takers:
        taker.add("d", tokens(1))
        taker.step()
        taker.step()
    assert len(daemon.blocks) == BLOCKS  # loading has begun
    for taker in takers:
        taker.settle()
        assert taker.outputs["d"] == computed
    assert not daemon.blocks
    assert [taker.counts.get("hit_blocks", 0) for taker in takers] == [BLOCKS, 0]
    assert takers[1].counts["miss_blocks/claimed"] == BLOCKS


@pytest.mark.parametrize("ends", ["failed", "aborted"])
def test_blocks_that_their_taker_could_not_use_are_given_back(rigs: Rigs, daemon: FakeDaemon, ends: str) -> None:
    computed = rigs(role="kv_producer").answer("p", tokens(1))
    first, second = (rigs(role="kv_consumer", extra={"kvstore.drop_on_load": True}) for _ in range(2))
    first.add("d", tokens(1))
    first.step()
    first.step()
    first.copies.fail_next = int(ends == "failed")
    if ends == "aborted":
        first.abort("d")
    else:
        assert first.copies.end_one(True)
    first.settle()
    assert ends == "aborted" or first.outputs["d"] == computed
    assert second.answer("d", tokens(1)) == computed
    assert second.counts["hit_blocks"] == BLOCKS
    assert not daemon.blocks


@pytest.mark.parametrize("apart", ["salt", "lora"])
def test_what_makes_other_kv_keeps_requests_apart(rigs: Rigs, daemon: FakeDaemon, apart: str) -> None:
    """The rig's KV depends on each of them: a shared block would be foreign."""
    prefill, decode = rigs(role="kv_producer"), rigs(role="kv_consumer")
    answers = {}
    for value in ("a", "b", None):
        answers[value] = prefill.answer(f"p {value}", tokens(1), **{apart: value})
    assert len(daemon.blocks) == 3 * BLOCKS
    for value, answer in answers.items():
        assert decode.answer(f"d {value}", tokens(1), **{apart: value}) == answer
    assert decode.counts["hit_blocks"] == 3 * BLOCKS


def test_what_has_no_salt_is_left_alone_where_one_is_required(rigs: Rigs, daemon: FakeDaemon) -> None:
    prefill = rigs(role="kv_producer", extra={"kvstore.require_salt": True})
    decode = rigs(role="kv_consumer", extra={"kvstore.require_salt": True})
    other = rigs()
    answer = prefill.answer("p", tokens(1))
    assert not daemon.blocks and prefill.counts["store_skipped_blocks/no_salt"] == BLOCKS
    assert other.answer("o", tokens(1)) == answer and len(daemon.blocks) == BLOCKS
    assert decode.answer("d", tokens(1)) == answer and not decode.counts.get("hit_blocks")
    salted = prefill.answer("p salted", tokens(1), salt="a")
    assert len(daemon.blocks) == 2 * BLOCKS
    assert decode.answer("d salted", tokens(1), salt="a") == salted and decode.counts["hit_blocks"] == BLOCKS
    assert not prefill.manager._store_nothing and not decode.manager._load_nothing


def test_an_adapter_that_was_trained_further_in_its_folder_is_another_one(
    rigs: Rigs, daemon: FakeDaemon, tmp_path: Path
) -> None:
    """vLLM's hash has an adapter's name and path only."""

    def trained(weights: bytes) -> dict[str, str]:
        (tmp_path / "adapter_config.json").write_text("{}")
        (tmp_path / "adapter_model.safetensors").write_bytes(weights)
        return {"lora": "sql", "lora_path": str(tmp_path)}

    rigs(role="kv_producer").answer("p", tokens(1), **trained(b"first"))
    decode = rigs(role="kv_consumer")
    decode.answer("d", tokens(1), **trained(b"second"))
    assert decode.counts.get("hit_blocks", 0) == 0
    decode = rigs(role="kv_consumer")
    decode.answer("d", tokens(1), **trained(b"first"))
    assert decode.counts["hit_blocks"] == BLOCKS


def test_requests_with_other_images_have_other_keys(model: Path) -> None:
    """The engine's own hashes are the keys, in full; they carry an image's hash from its first block on."""
    from vllm import SamplingParams
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.v1.request import Request

    from engine_plugin.vllm.runs import hash_of
    from tests.vllm.scheduler_rig import configuration

    _, hasher = configuration(model)
    keys = []
    for image in ("one", "two"):
        place = PlaceholderRange(offset=BLOCK_TOKENS + 3, length=8)
        feature = MultiModalFeatureSpec(data=None, modality="image", identifier=image, mm_position=place)
        request = Request("r", tokens(1), SamplingParams(), None, mm_features=[feature], block_hasher=hasher)
        keys.append([hash_of(block_hash + bytes(4)) for block_hash in request.block_hashes])
    assert keys[0][0] == keys[1][0]
    assert not set(keys[0][1:]) & set(keys[1][1:])
    assert {len(key) for key in keys[0]} == {32}


def test_a_load_that_fails_is_computed_and_stored_copies_are_not_promised_again(rigs: Rigs, daemon: FakeDaemon) -> None:
    computed = rigs(role="kv_producer").answer("p", tokens(1))
    one = rigs(role="kv_consumer")
    one.copies.fail_next = 1
    assert one.answer("d", tokens(1)) == computed
    assert one.failed_loads == 1
    one.reset(connector=False)
    assert one.answer("again", tokens(1)) == computed
    assert one.counts["miss_blocks/distrusted"] == 2  # right after the failure, and now
    assert one.failed_loads == 1


def test_no_copy_is_under_way_when_the_engine_falls_asleep(rigs: Rigs, daemon: FakeDaemon) -> None:
    rigs(role="kv_producer").answer("p", tokens(1))
    before = set(daemon.blocks)
    one = rigs()
    one.add("loads", tokens(1))
    one.add("stores", tokens(2))
    for _ in range(10):
        one.step()
    assert one.copies.queues[True] and one.copies.queues[False]
    for id_ in one.alive():
        one.abort(id_)
    one.reset(connector=True)
    one.worker.unregister_kv_caches()  # vLLM takes the memory away now
    assert not one.copies.queues[True] and not one.copies.queues[False]
    one.memory.fill_(0)
    one.settle()
    assert set(daemon.blocks) <= before  # nothing of what was under way is published
    assert one.answer("after", tokens(1))


def test_a_store_that_fails_is_not_published(rigs: Rigs, daemon: FakeDaemon) -> None:
    one = rigs()
    one.copies.fail_next = 100
    one.answer("p", tokens(1))
    assert not daemon.blocks
    assert one.counts["store_skipped_blocks/copy_failed"] == BLOCKS


def test_preempted_requests_give_the_same_answers(rigs: Rigs, daemon: FakeDaemon) -> None:
    roomy = rigs(blocks=200, role="kv_producer")
    wanted = [roomy.answer(f"{seed}", tokens(seed, 4), max_tokens=60) for seed in range(6)]
    tight = rigs(blocks=24)
    for seed in range(6):
        tight.add(f"{seed}", tokens(seed, 4), max_tokens=60)
    tight.settle()
    assert tight.preemptions > 0
    assert [tight.outputs[f"{seed}"] for seed in range(6)] == wanted


def test_events_say_what_was_stored(rigs: Rigs, daemon: FakeDaemon) -> None:
    from vllm.distributed.kv_events import BlockStored

    one = rigs(events=True, extra={"self_describing_kv_events": True})
    one.answer("p", tokens(1))
    stored = [event for event in one.events if isinstance(event, BlockStored) and event.medium == "CPU"]
    assert sum(len(event.block_hashes) for event in stored) == BLOCKS
    assert [token for event in stored for token in event.token_ids] == tokens(1)[: BLOCKS * BLOCK_TOKENS]
    assert stored[0].parent_block_hash is None

    for key in list(daemon.blocks)[4:]:
        daemon.evict(key)
    one.reset(connector=False)
    one.events.clear()
    one.answer("again", tokens(1))
    medium = [(type(event).__name__, len(event.block_hashes)) for event in one.events if event.medium == "CPU"]
    assert medium == [("BlockRemoved", 2)] + [("BlockStored", 1)] * 2
    tracker = one.connector.connector_scheduler._events_tracker
    one.copies.fail_next = 100
    one.answer("never stored", tokens(2))
    one.step()
    assert len(tracker._pending_event_metadata) == BLOCKS  # vLLM has let go of what was never stored


def test_events_say_what_the_daemon_has_evicted(rigs: Rigs, daemon: FakeDaemon) -> None:
    from vllm.distributed.kv_events import BlockRemoved

    one = rigs(events=True)
    one.answer("a", tokens(1))
    one.events.clear()
    for key in list(daemon.blocks)[:2]:
        daemon.evict(key)
    for number in range(3):  # steps of any request bring the news
        one.time += ASK_EVERY_S
        one.answer(f"other {number}", tokens(2 + number, 1))
    removed = [event for event in one.events if isinstance(event, BlockRemoved) and event.medium == "CPU"]
    assert sum(len(event.block_hashes) for event in removed) == 2


def random_life(rig: SchedulerRig, daemon: FakeDaemon, rng: random.Random, events: int) -> None:
    """Requests that share prefixes, and everything that can come between them and their answers."""

    def some() -> str | None:
        alive = rig.alive()
        return rng.choice(alive) if alive else None

    number = 0
    for _ in range(events):
        match rng.randrange(32):
            case 0 | 1 | 2:
                if len(rig.alive()) < 8:
                    number += 1
                    prompt = tokens(rng.randrange(5), 7)[: rng.randrange(20, 7 * BLOCK_TOKENS)]
                    own = rng.choices(range(2, 1000), k=rng.randrange(1, 40))
                    lora = rng.choice((None, None, "a"))
                    rig.add(f"{number}", prompt + own, max_tokens=rng.randrange(1, 40), lora=lora)
            case 3:
                if (id_ := some()) is not None:
                    rig.abort(id_)
            case 4:
                rig.copies.fail_next = rng.choice((0, 0, 1))
            case 5:
                if daemon.up and daemon.blocks:
                    daemon.evict(rng.choice(sorted(daemon.blocks)))
            case 6:
                if daemon.up and daemon.blocks:
                    daemon.copy_down(rng.choice(sorted(daemon.blocks)))
            case 7:
                if daemon.up and daemon.coming:
                    daemon.come_up(rng.choice(sorted(daemon.coming)))
            case 8:
                if rng.random() < 0.2:
                    daemon.die() if daemon.up else daemon.start()
            case 9:
                if rng.random() < 0.5:
                    rig.attach()
            case 10:
                if rng.random() < 0.2:
                    daemon.silent = not daemon.silent
            case 11:
                if rng.random() < 0.2:
                    rig.reset(connector=False)
            case 12:
                if rng.random() < 0.05 and not rig.copies.queues[True]:
                    rig.reset(connector=True)
            case 13:
                pinned = sorted(key for key, slot in daemon.blocks.items() if daemon.pins(slot))
                if rng.random() < 0.5 and daemon.up and pinned:
                    daemon.trample(rng.choice(pinned))
            case 14:
                rig.time += rng.choice((0.1, 0.6, 1.0, 5.0))
            case 15 | 16 | 17 | 18 | 19:
                rig.copies.end_one(is_load=True)
            case 20 | 21 | 22 | 23:
                rig.copies.end_one(is_load=False)
            case 24 | 25:
                rig.step(turn=False)
            case _:
                rig.step()
        if daemon.up:
            daemon.check()
    daemon.silent = False
    if not daemon.up:
        daemon.start()
    rig.attach()
    while daemon.coming:
        daemon.come_up(next(iter(daemon.coming)))
    rig.settle()


@pytest.mark.parametrize("seed", range(60))
def test_any_order_of_events(rigs: Rigs, daemon: FakeDaemon, seed: int) -> None:
    rng = random.Random(seed)
    extra: dict[str, Any] = {"offload_prompt_only": rng.random() < 0.5}
    role = rng.choice(("kv_both", "kv_both", "kv_consumer"))
    if role == "kv_consumer":
        extra["kvstore.drop_on_load"] = rng.random() < 0.5
        rigs(role="kv_producer", blocks=100).answer("before", tokens(0, 7))
    rig = rigs(role=role, extra=extra, blocks=rng.choice((24, 40, 60)))
    random_life(rig, daemon, rng, 400)
    rig.time += 20
    for _ in range(3):
        rig.link.turn()
