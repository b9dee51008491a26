"""Instances that say they are well and fail every request are left out for a while."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvstore.router.breaker import FAILED_MAX, PAUSE_MAX_S, PAUSE_MIN_S, Breaker
from kvstore.testing.time import FakeClock
from tests.router.conftest import Start
from tests.router.test_faults import right_answer, text_of


def tripped(clock: FakeClock) -> Breaker:
    breaker = Breaker(clock.monotonic)
    assert [breaker.failed() for _ in range(FAILED_MAX)] == [False] * (FAILED_MAX - 1) + [True]
    return breaker


def test_only_failures_in_a_row_count() -> None:
    breaker = Breaker(FakeClock().monotonic)
    for _ in range(3):
        for _ in range(FAILED_MAX - 1):
            assert not breaker.failed()
        breaker.well()
    assert breaker.ready and not breaker.paused and breaker.pauses == 0


def test_a_pause_ends_with_one_trial_at_a_time() -> None:
    clock = FakeClock()
    breaker = tripped(clock)
    assert breaker.paused and not breaker.ready
    assert not breaker.begin()  # the last resort is no trial
    assert not breaker.failed()  # nor does it make the pause longer
    clock.advance(PAUSE_MIN_S)
    assert breaker.ready
    assert breaker.begin()
    assert not breaker.ready and not breaker.begin()
    breaker.end()  # its client has gone: no result
    assert breaker.ready and breaker.begin()
    breaker.well()
    breaker.end()
    assert breaker.ready and not breaker.paused


def test_pauses_double_up_to_a_limit() -> None:
    clock = FakeClock()
    breaker = tripped(clock)
    pause = PAUSE_MIN_S
    for _ in range(10):
        clock.advance(pause / 2)
        assert not breaker.ready
        clock.advance(pause / 2)
        assert breaker.begin()
        assert breaker.failed()
        breaker.end()
        pause = min(PAUSE_MAX_S, 2 * pause)
    assert pause == PAUSE_MAX_S
    assert breaker.pauses == 11


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_instance_that_only_says_it_is_well_is_left_out(routed: Start, role: str) -> None:
    run = await routed(2, 2)
    bad = (run.prefills if role == "prefill" else run.decodes)[0]
    bad.status = 500

    async def ask(times: int) -> None:
        for number in range(times):
            status, answer = await run.chat(str(number))
            assert status == 200 and text_of(answer) == right_answer(str(number))

    async def paused() -> Any:
        _, page = await run.get("/health")
        return [each["paused"] for each in json.loads(page)[role]]

    await ask(3 * FAILED_MAX)
    assert len(bad.requests) == FAILED_MAX
    assert await paused() == [True, False]
    label = f'{{role="{role}",url="{bad.url}"}}'
    assert await run.figure(f"kvstore_router_instance_paused{label}") == 1
    assert await run.figure(f"kvstore_router_instance_pauses_total{label}") == 1
    assert await run.figure(f"kvstore_router_instance_up{label}") == 1
    run.clock.advance(PAUSE_MIN_S)
    await ask(3)
    assert len(bad.requests) == FAILED_MAX + 1  # the trial, and its client got its answer elsewhere
    bad.status = 200
    run.clock.advance(2 * PAUSE_MIN_S)
    before = len(bad.requests)
    await ask(4)
    assert len(bad.requests) >= before + 2
    assert await paused() == [False, False]


async def test_where_every_decode_instance_is_left_out_one_is_asked_all_the_same(routed: Start) -> None:
    run = await routed(1, 1)
    run.decodes[0].status = 500
    for _ in range(2 * FAILED_MAX):
        assert (await run.chat())[0] == 500
    assert len(run.decodes[0].requests) == 2 * FAILED_MAX
    run.decodes[0].status = 200
    assert (await run.chat())[0] == 200
    assert await run.figure(f'kvstore_router_instance_paused{{role="decode",url="{run.decodes[0].url}"}}') == 0


async def test_prefill_that_hangs_is_left_out_too(routed: Start) -> None:
    run = await routed(1, 1, prefill_timeout_s=0.05)
    run.prefills[0].gate.clear()
    for _ in range(FAILED_MAX + 2):
        assert (await run.chat())[0] == 200
    assert len(run.prefills[0].requests) == FAILED_MAX
