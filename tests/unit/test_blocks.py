"""Namespaces: what tells bytes apart, and how it is written down."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from kvstore.blocks import (
    BLOCK_BYTES_MAX,
    DIGEST_BYTES,
    Namespace,
    check_block_bytes,
    digest_of_identity,
    parse_identity,
)
from kvstore.errors import InvalidRequest, SizeMismatch

BASE = Namespace(model="m", dtype="bfloat16", block_size=64, block_bytes=1000)
OTHER: dict[str, Any] = {
    "model": "n",
    "dtype": "float16",
    "block_size": 32,
    "revision": "r1",
    "tokens_per_hash": 16,
    "layers": (("a", "b"), ("c",)),
    "layout": "LBHNC",
    "parallel": "tp=2",
    "hash_algo": "sha256",
    "hash_seed": "0",
    "lora": "l",
    "salt": "s",
    "tenant": "t",
    "extra": (("k", "v"),),
}


@pytest.mark.parametrize("field", OTHER)
def test_every_field_changes_the_digest(field: str) -> None:
    other = dataclasses.replace(BASE, **{field: OTHER[field]})
    assert other.digest() != BASE.digest()
    assert len(other.digest()) == DIGEST_BYTES


def test_the_table_above_has_every_field_but_the_sizes() -> None:
    names = {field.name for field in dataclasses.fields(Namespace)}
    assert names - set(OTHER) == {"block_bytes", "more_group_bytes", "copy_down"}


def test_sizes_do_not_change_the_digest() -> None:
    other = dataclasses.replace(BASE, block_bytes=2000, more_group_bytes=(5,))
    assert other.digest() == BASE.digest() and other.group_bytes == (2000, 5)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"layers": (("ab", "c"),)}, {"layers": (("a", "bc"),)}),
        ({"layers": (("a", "b"),)}, {"layers": (("a",), ("b",))}),
        ({"extra": (("a", "b"), ("c", "d"))}, {"extra": (("a", "bcd"),)}),
        ({"lora": "x"}, {"salt": "x"}),
        ({"model": 'm","dtype":"x'}, {"model": "m"}),
        ({"model": "m\u00e9"}, {"model": "me\u0301"}),
    ],
)
def test_fields_cannot_be_mistaken_for_each_other(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert dataclasses.replace(BASE, **one).digest() != dataclasses.replace(BASE, **other).digest()


def test_the_identity_is_canonical_and_reads_back() -> None:
    namespace = dataclasses.replace(BASE, **OTHER)
    text = namespace.identity()
    fields = json.loads(text)
    assert text.isascii() and text == json.dumps(fields, sort_keys=True, separators=(",", ":"))
    assert dict(parse_identity(text)) == fields
    assert digest_of_identity(text) == namespace.digest()
    # Fixed for good: what was stored under it on disk and in Redis has to be found again by every later version.
    assert BASE.digest().hex() == "3060f137a8f2f67e893d1280532baf78"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text + " ",
        lambda text: text.replace(":", ": ", 1),
        lambda text: text[:-1],
        lambda text: text.replace('"tenant":""', '"tenant":"","zone":""'),
        lambda text: text.replace(',"tenant":""', ""),
        lambda text: "[" * 100_000,
        lambda text: "null",
        lambda text: "\ud800",
    ],
)
def test_any_other_text_is_refused(spoil: Any) -> None:
    with pytest.raises(InvalidRequest):
        parse_identity(spoil(BASE.identity()))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": ""}, "model"),
        ({"dtype": "auto"}, "auto"),
        ({"dtype": ""}, "dtype"),
        ({"block_size": 0}, "block_size"),
        ({"block_bytes": 0}, "group 0"),
        ({"more_group_bytes": (5, BLOCK_BYTES_MAX + 1)}, "group 2"),
    ],
)
def test_impossible_values_are_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        dataclasses.replace(BASE, **change)


def test_a_wrong_size_is_refused_and_both_are_named() -> None:
    check_block_bytes(BASE.identity(), (1000, 5), (1000, 5))
    with pytest.raises(SizeMismatch, match=r"\[1000\].*\[2000, 5\]"):
        check_block_bytes(BASE.identity(), (1000,), (2000, 5))


def test_the_block_size_may_be_the_daemons() -> None:
    open_ = dataclasses.replace(BASE, block_size=None)
    with pytest.raises(InvalidRequest):
        open_.identity()
    assert open_.settled(64) == BASE and BASE.settled(128) is BASE
