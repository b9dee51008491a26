"""Requests of the data port as bytes."""

from __future__ import annotations

import pytest

from kvstore.blocks import KEY_BYTES_MAX
from kvstore.data_wire import (
    BODY_BYTES_MAX,
    REQUEST_HEAD_BYTES,
    SLOTS_MAX,
    Garbage,
    Operation,
    Query,
    Request,
    SelectRequest,
    body_bytes,
    parse_request,
)

SECRET, NONCE = bytes(range(32)), bytes(range(16))
SESSION, GENERATION, NAMESPACE = b"s" * 16, b"g" * 16, b"n" * 16
#: Of a body with keys: namespace, group, room, whole.
QUERY_BYTES = 28


def query(keys: list[bytes], **changes: object) -> Query:
    fields = {"namespace": NAMESPACE, "group": 3, "length": 8 << 20, "keys": keys, "whole": True, **changes}
    return Query(**fields)  # type: ignore[arg-type]


def read(packed: bytes) -> Request | SelectRequest:
    head, body = packed[:REQUEST_HEAD_BYTES], packed[REQUEST_HEAD_BYTES:]
    assert body_bytes(head) == len(body)
    sealed = parse_request(head, body)
    assert sealed.is_from(SECRET, NONCE, 7)
    assert not sealed.is_from(SECRET, NONCE, 8) and not sealed.is_from(bytes(32), NONCE, 7)
    return sealed.request


@pytest.mark.parametrize("keys", [[b"a"], [b"k" * KEY_BYTES_MAX, b"\0", b"xyz"], [b"%d" % n for n in range(SLOTS_MAX)]])
def test_keys_come_back(keys: list[bytes]) -> None:
    asked = SelectRequest(SESSION, GENERATION, query(keys), room=5)
    assert asked.query.fits
    assert read(asked.pack(SECRET, NONCE, 7)) == asked


def test_slots_come_back() -> None:
    asked = Request(Operation.READ, SESSION, GENERATION, 4, 5, [1 << 40, 6], [(1 << 32) - 1, 0])
    assert read(asked.pack(SECRET, NONCE, 7)) == asked


@pytest.mark.parametrize(
    "keys",
    [
        [],
        [b""],
        [b"a", b""],
        [b"k" * (KEY_BYTES_MAX + 1)],
        [b"k"] * (SLOTS_MAX + 1),
        [b"k" * KEY_BYTES_MAX] * (BODY_BYTES_MAX // KEY_BYTES_MAX),
    ],
)
def test_what_does_not_fit_is_known(keys: list[bytes]) -> None:
    assert not query(keys).fits


def test_a_changed_key_is_not_from_the_caller() -> None:
    packed = bytearray(SelectRequest(SESSION, GENERATION, query([b"key"]), room=1).pack(SECRET, NONCE, 7))
    packed[-1] ^= 1
    sealed = parse_request(bytes(packed[:REQUEST_HEAD_BYTES]), bytes(packed[REQUEST_HEAD_BYTES:]))
    assert not sealed.is_from(SECRET, NONCE, 7)


@pytest.mark.parametrize("operation", [Operation.READ, Operation.WRITE, Operation.CHECK])
@pytest.mark.parametrize("change", [-1, 1])
def test_slots_that_are_cut_off_are_garbage(operation: Operation, change: int) -> None:
    packed = Request(operation, SESSION, GENERATION, 0, 1, [1, 2], [1, 2]).pack(SECRET, NONCE, 7) + bytes(1)
    with pytest.raises(Garbage):
        parse_request(packed[:REQUEST_HEAD_BYTES], packed[REQUEST_HEAD_BYTES : len(packed) - 1 + change])


def test_keys_that_are_none_are_garbage() -> None:
    packed = SelectRequest(SESSION, GENERATION, query([b"key", b"other"]), room=1).pack(SECRET, NONCE, 7)
    head, body = packed[:REQUEST_HEAD_BYTES], packed[REQUEST_HEAD_BYTES:]
    lengths = slice(QUERY_BYTES, QUERY_BYTES + 2)
    assert body[lengths] == b"\x03\x05"
    for wrong in (b"\0\x08", b"\x03\x04", b"\x03\x06", bytes([3, KEY_BYTES_MAX + 1])):
        with pytest.raises(Garbage):
            parse_request(head, body[: lengths.start] + wrong + body[lengths.stop :])
    for end in (0, QUERY_BYTES, QUERY_BYTES + 1, len(body) - 1):
        with pytest.raises(Garbage):
            parse_request(head, body[:end])
