"""One pause of vLLM's loop is left out when a load has ended."""

from __future__ import annotations

import threading
import time
from types import ModuleType
from typing import Any

import pytest

from engine_plugin.vllm import pauses


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(time, "sleep", found.append)
    return found


def loop() -> Any:
    module = ModuleType("loop")
    module.time = time  # type: ignore[attr-defined]
    return module


def test_the_next_pause_is_left_out_and_no_other(slept: list[float]) -> None:
    module = loop()
    assert pauses.skip_next(module) and pauses.skip_next(module)
    assert module.time is not time and module.time.monotonic is time.monotonic
    for _ in range(3):
        module.time.sleep(0.001)
    assert slept == [0, 0.001, 0.001]


def test_a_longer_sleep_is_slept(slept: list[float]) -> None:
    module = loop()
    pauses.skip_next(module)
    module.time.sleep(0.5)
    module.time.sleep(0.001)
    assert slept == [0.5, 0]


def test_other_threads_sleep_as_ever(slept: list[float]) -> None:
    module = loop()
    pauses.skip_next(module)
    other = threading.Thread(target=module.time.sleep, args=(0.001,))
    other.start()
    other.join()
    module.time.sleep(0.001)
    assert slept == [0.001, 0]


def test_a_clock_of_somebody_elses_is_left_alone() -> None:
    module = loop()
    clock = module.time = ModuleType("another")
    assert not pauses.skip_next(module) and module.time is clock
