"""What KV events tell, and adapters by content."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from engine_plugin.vllm.adapters import Adapters
from engine_plugin.vllm.announced import Announced
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
