"""What KV events tell, and adapters by content."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from engine_plugin.vllm.adapters import Adapters
from engine_plugin.vllm.announced import ANSWER_S, ASK_EVERY_S, ASKED_MAX, Announced, Rounds
from engine_plugin.vllm.runs import hash_of

KEYS = [bytes([i]) * 36 for i in range(10)]


def test_each_change_is_told_once_and_in_order() -> None:
    announced = Announced()
    announced.there(KEYS[:3])
    announced.there(KEYS[1:4])
    announced.gone(KEYS[2:9])
    announced.there(KEYS[2:3])
    assert announced.take() == [(False, KEYS[:4]), (True, KEYS[2:4]), (False, KEYS[2:3])]
    assert announced.take() == []
    announced.all_gone()
    assert announced.take() == [(True, KEYS[:3])]


def test_what_is_announced_is_bounded() -> None:
    announced = Announced(most=4)
    announced.there(KEYS[:4])
    announced.there(KEYS[:1])  # again
    announced.there(KEYS[4:6])
    assert announced.take() == [(False, KEYS[:6]), (True, KEYS[1:3])]


def test_what_was_never_stored_is_let_go_of_unless_it_is_there() -> None:
    announced = Announced()
    announced.there(KEYS[:1])
    announced.never(KEYS[:2])
    assert announced.take() == [(False, KEYS[:1]), (True, KEYS[1:2])]


def test_nothing_is_noted_where_events_are_off() -> None:
    announced = Announced(on=False)
    announced.there(KEYS)
    announced.never(KEYS)
    announced.all_gone()
    assert announced.take() == []


class Asked:
    """A daemon that answers when it is told to."""

    def __init__(self) -> None:
        self.time = 100.0
        self.announced = Announced()
        self.questions: list[tuple[list[bytes], Any]] = []
        self.rounds = Rounds(self.announced, lambda keys, then: self.questions.append((keys, then)), lambda: self.time)

    def answer(self, present: list[bytes] | None, *, apart: bytes = b"") -> None:
        keys, then = self.questions.pop(0)
        there = None if present is None else {hash_of(key, apart) for key in present}
        then(None if there is None else [key in there for key in keys])
        self.rounds.turn()

    def turn(self, after_s: float = ASK_EVERY_S) -> None:
        self.time += after_s
        self.rounds.turn()


def test_what_the_daemon_has_evicted_is_withdrawn() -> None:
    asked = Asked()
    asked.turn()
    assert not asked.questions  # nothing is announced
    asked.announced.there(KEYS[:4])
    asked.announced.take()
    asked.turn()
    asked.turn()
    assert len(asked.questions) == 1  # one at a time
    asked.announced.there(KEYS[1:2])  # stored again since the question
    asked.answer(KEYS[2:3])
    assert asked.announced.take() == [(True, [KEYS[0], KEYS[3]])]
    asked.turn()
    asked.answer(KEYS[2:3])
    assert asked.announced.take() == [(True, [KEYS[1]])]


def test_no_answer_withdraws_nothing_and_ends_nothing() -> None:
    asked = Asked()
    asked.announced.there(KEYS[:4])
    asked.announced.take()
    asked.turn()
    asked.answer(None)
    asked.turn()
    assert len(asked.questions) == 1
    lost = asked.questions.pop()
    asked.turn(ANSWER_S)
    asked.turn()
    asked.answer(KEYS[:3])
    lost[1]([False] * 4)  # so late that it speaks of another time
    asked.turn(0)
    assert asked.announced.take() == [(True, [KEYS[3]])]


def test_all_of_them_are_asked_about_in_turn() -> None:
    asked = Asked()
    keys = [number.to_bytes(36, "big") for number in range(ASKED_MAX + 10)]
    asked.announced.there(keys, b"adapter")
    seen = []
    for _ in range(2):
        asked.turn()
        seen += asked.questions[0][0]
        asked.answer(keys, apart=b"adapter")
    assert seen[: len(keys)] == [hash_of(key, b"adapter") for key in keys]
    assert len(asked.announced.take()) == 1  # all of them are there


def test_nobody_asks_where_events_are_off() -> None:
    asked = Asked()
    asked.rounds = Rounds(Announced(on=False), asked.rounds._ask, lambda: asked.time)
    asked.turn()
    assert not asked.questions


def adapter(folder: Path, number: int = 1, reload: bool = False) -> Any:
    return SimpleNamespace(lora_int_id=number, lora_path=str(folder), load_inplace=reload)


def write(folder: Path, weights: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


def test_an_adapter_is_its_files(tmp_path: Path) -> None:
    adapters = Adapters()
    adapters.arrived("a", adapter(write(tmp_path / "a", b"1")))
    adapters.arrived("b", adapter(write(tmp_path / "b", b"2")))
    adapters.arrived("same", adapter(write(tmp_path / "c", b"1")))
    adapters.arrived("none", None)
    adapters.arrived("hub", adapter(Path("someone/adapter")))
    assert adapters.of("a") == adapters.of("same") != b""
    assert len({adapters.of(name) for name in ("a", "b", "none", "hub")}) == 4
    assert adapters.of("none") == b""
    adapters.finished("a")
    assert adapters.of("a") == b""
    (tmp_path / "b" / "adapter_config.json").write_text('{"r": 8}')
    adapters.arrived("rank", adapter(tmp_path / "b", number=2))
    assert adapters.of("rank") != adapters.of("b")


def test_files_that_change_later_count_only_where_they_are_loaded_again(tmp_path: Path) -> None:
    adapters = Adapters()
    folder = write(tmp_path / "a", b"1")
    adapters.arrived("before", adapter(folder))
    write(folder, b"2")
    adapters.arrived("after", adapter(folder))
    assert adapters.of("before") == adapters.of("after")
    adapters.arrived("reloaded", adapter(folder, reload=True))
    assert adapters.of("reloaded") != adapters.of("before")
    write(folder, b"3")
    os.utime(folder / "adapter_model.safetensors", ns=(1, 1))
    adapters.arrived("again", adapter(folder, reload=True))
    assert len({adapters.of(name) for name in ("before", "reloaded", "again")}) == 3


def test_what_is_apart_shares_no_key() -> None:
    assert hash_of(KEYS[0]) == KEYS[0][:32]
    names = {hash_of(KEYS[0]), hash_of(KEYS[0], b"a"), hash_of(KEYS[0], b"b"), hash_of(KEYS[1], b"a")}
    assert len(names) == 4
    assert {len(name) for name in names} == {32}
