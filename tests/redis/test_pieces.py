"""The pure pieces: addresses, values, the breaker, the books."""

from __future__ import annotations

import struct

import pytest
import xxhash

from kvstore.errors import ConfigError
from kvstore.testing import FakeClock
from kvstore.testing.tier_suite import OURS, name_of
from kvstore.tier import TierNamespace, TierState
from kvstore.tiers.redis import RedisTier
from kvstore.tiers.redis_books import Books
from kvstore.tiers.redis_health import FAILURES_MAX, Breaker, Fault, RedisHealth
from kvstore.tiers.redis_url import Kind, parse_redis_url
from kvstore.tiers.redis_value import (
    HEADER_BYTES_MAX,
    NAME_BYTES_MAX,
    PART_BYTES_MAX,
    PAYLOAD_BYTES,
    Names,
    header_bytes,
    pack_header,
    pack_namespace,
    parse_header,
    parse_namespace,
    part_bytes,
    part_count,
    seal_of,
)

KEY = name_of(1)

# -- addresses ---------------------------------------------------------------------------------------------------------


def test_addresses() -> None:
    address = parse_redis_url("redis://user:p%40ss@host:7000/3")
    assert (address.kind, address.tls, address.hosts) == (Kind.SINGLE, False, (("host", 7000),))
    assert address.login == {"username": "user", "password": "p@ss", "db": 3}
    assert address.shown == "redis://user@host:7000/3"
    assert address.scrub("it says p@ss and p%40ss") == "it says *** and ***"
    assert parse_redis_url("redis://host").hosts == (("host", 6379),)
    assert parse_redis_url("redis://[::1]:7000").hosts == (("::1", 7000),)
    secure = parse_redis_url("rediss://host?ssl_ca_certs=/ca.pem&ssl_check_hostname=false")
    assert secure.tls and secure.login == {"ssl_ca_certs": "/ca.pem", "ssl_check_hostname": False}
    cluster = parse_redis_url("rediss+cluster://:pw@one:1,two:2,[::1]:3")
    assert (cluster.kind, cluster.tls) == (Kind.CLUSTER, True)
    assert cluster.hosts == (("one", 1), ("two", 2), ("::1", 3))
    sentinel = parse_redis_url("redis+sentinel://u:pw@one,two:5/kv/2?sentinel_username=s&sentinel_password=spw")
    assert (sentinel.kind, sentinel.service) == (Kind.SENTINEL, "kv")
    assert sentinel.hosts == (("one", 26379), ("two", 5))
    assert sentinel.login == {"username": "u", "password": "pw", "db": 2}
    assert sentinel.sentinel_login == {"username": "s", "password": "spw"}
    assert parse_redis_url("unix://u:pw@/run/redis.sock?db=1").login == {
        "path": "/run/redis.sock",
        "username": "u",
        "password": "pw",
        "db": 1,
    }


@pytest.mark.parametrize(
    "url",
    [
        "http://host",
        "host:6379",
        "redis://",
        "redis://u:secret@",
        "redis://one,two",
        "redis://u:secret@host:notaport",
        "redis://host/name",
        "redis+cluster://host/1",
        "redis+sentinel://host",
        "redis+sentinel://host/",
        "redis://u:secret@host?socket_timeout=5",
        "redis://host?protocol=3",
        "redis://host?db=x",
    ],
)
def test_addresses_that_make_no_sense(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_redis_url(url)
    assert "secret" not in str(caught.value)


async def test_settings_that_make_no_sense() -> None:
    for options in (
        {"key_prefix": ""},
        {"key_prefix": "a{b}"},
        {"key_prefix": "a b"},
        {"key_prefix": "ä"},
        {"connections": 1},
        {"deadline_s": 0.0},
        {"ttl_s": 0},
        {"capacity_bytes": 0},
    ):
        with pytest.raises(ConfigError):
            RedisTier("redis://host", FakeClock(), **options)  # type: ignore[arg-type]


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, PAYLOAD_BYTES, PAYLOAD_BYTES + 1, 8 << 20, 3 * PAYLOAD_BYTES])
def test_parts_make_up_the_block(size: int) -> None:
    lengths = [part_bytes(size, part) for part in range(part_count(size))]
    assert sum(lengths) == size and all(length > 0 for length in lengths)
    longest = b"k" * NAME_BYTES_MAX
    assert header_bytes(longest) == HEADER_BYTES_MAX and HEADER_BYTES_MAX + PAYLOAD_BYTES <= PART_BYTES_MAX < 2 << 20


def test_headers_come_back_and_any_changed_bit_is_noticed() -> None:
    header = pack_header(KEY, 5 << 20, 1, 123, 0)
    parsed = parse_header(KEY, header + b"payload")
    assert parsed is not None and len(header) == header_bytes(KEY)
    assert (parsed.part, parsed.parts, parsed.total_bytes, parsed.check, parsed.seal) == (1, 3, 5 << 20, 123, 0)
    assert parsed.payload_bytes == PAYLOAD_BYTES
    for bit in range(8 * len(header)):
        changed = bytearray(header)
        changed[bit // 8] ^= 1 << bit % 8
        assert parse_header(KEY, changed) is None
    for length in range(len(header)):
        assert parse_header(KEY, header[:length]) is None
    assert parse_header(name_of(2), header) is None
    assert parse_header(KEY[:-1], header) is None


@pytest.mark.parametrize(
    ("at", "layout", "value"), [(12, "<I", 1), (16, "<I", 2), (20, "<Q", 0), (20, "<Q", 9 << 20), (28, "<Q", 99)]
)
def test_headers_that_somebody_made_up(at: int, layout: str, value: int) -> None:
    """With a checksum that is right, but fields that do not fit each other: part, parts, total, payload."""
    header = bytearray(pack_header(KEY, 100, 0, 0, 0))
    assert parse_header(KEY, header) is not None
    struct.pack_into(layout, header, at, value)
    struct.pack_into("<Q", header, len(header) - 8, xxhash.xxh3_64_intdigest(header[:-8]))
    assert parse_header(KEY, header) is None


def test_seals_know_order_and_number() -> None:
    seals = {seal_of(checks) for checks in ([1, 2, 3], [3, 2, 1], [1, 2], [1, 2, 3, 0], [])}
    assert len(seals) == 5


def test_names_of_keys() -> None:
    names = Names("kv[1]*?\\:")
    assert names.parts(KEY, 2) == [names.part(KEY, 0), names.part(KEY, 1)]
    assert names.parse(names.part(KEY, 12)) == (KEY, 12)
    assert names.part(KEY, 0).split(b"{")[1].split(b"}")[0] == names.tag(KEY)
    assert names.pattern == rb"kv\[1\]\*\?\\:{*"
    for key in (b"", b"kv:", names.namespaces, names.order(OURS), names.part(b"short", 0), names.part(KEY, 0) + b"x"):
        assert names.parse(key) is None
    assert names.is_beside(names.namespaces) and names.is_beside(names.order(OURS))
    assert not names.is_beside(names.part(KEY, 0))


def test_texts_of_namespaces() -> None:
    namespace = TierNamespace(OURS, '{"model":"ä"}', (1, 2))
    text = pack_namespace(namespace)
    assert parse_namespace(OURS, text) == namespace
    assert parse_namespace(b"t" * 16, text) is None
    for place in range(len(text)):
        assert parse_namespace(OURS, text[:place]) is None
        assert parse_namespace(OURS, text[:place] + bytes([text[place] ^ 1]) + text[place + 1 :]) is None
    for body in (b"{}", b"[]", b'{"identity":1,"group_bytes":[]}', b'{"identity":"","group_bytes":["a"]}', b"\xff"):
        made_up = text[:8] + OURS + body
        made_up += xxhash.xxh3_64_intdigest(made_up).to_bytes(8, "little")
        assert parse_namespace(OURS, made_up) is None


# -- health ------------------------------------------------------------------------------------------------------------


def test_a_breaker() -> None:
    clock = FakeClock()
    breaker = Breaker(clock, 1.0)
    for _ in range(3):
        assert not any(breaker.failed() for _ in range(FAILURES_MAX - 1))
        breaker.answered()
    for _ in range(FAILURES_MAX - 1):
        breaker.failed()
    assert breaker.failed() and breaker.open and not breaker.failed()
    waits = []
    for _ in range(8):
        waited = 0.0
        while not breaker.probe_due():
            clock.advance(0.5)
            waited += 0.5
        waits.append(waited)
    assert waits == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0, 10.0]
    # A call that began before says nothing.
    breaker.answered()
    assert breaker.open
    assert breaker.fine() and not breaker.open and not breaker.fine()


def test_the_state_of_several_servers() -> None:
    clock = FakeClock()
    health = RedisHealth("redis", clock, 1.0)
    assert health.state is TierState.FAILED
    health.whole.fine()
    fault = Fault("timeout", "nothing")
    for _ in range(FAILURES_MAX):
        health.breaker("two")
        health.failed("one", fault)
    assert health.state is TierState.OK
    for _ in range(FAILURES_MAX):
        health.failed("two", fault)
    assert health.state is TierState.FAILED
    health.keep_only(["three"])
    assert health.state is TierState.OK
    health.refused("OOM")
    assert health.state is TierState.DEGRADED
    clock.advance(1.0)
    assert health.state is TierState.OK
    health.refused("OOM")
    clock.advance(1.0)
    assert health.full, "the second wait is longer"
    clock.advance(1.0)
    health.took()
    health.refused("OOM")
    clock.advance(1.0)
    assert not health.full


# -- books -------------------------------------------------------------------------------------------------------------


def test_the_first_sweep_puts_what_is_there_in_its_order() -> None:
    books = Books(100, FakeClock())
    books.begin_sweep()
    books.found([(b"old", 20), (b"new", 20), (b"unknown", 20)])
    books.add([(b"mine", 20)])
    books.found([(b"mine", 20)])
    books.end_sweep({b"old": 5.0, b"new": 7.0})
    assert books.complete and books.used_bytes == 80
    assert books.hold(60) == (True, [b"unknown", b"old"])
    assert books.hold(41) == (False, [])
    assert books.hold(40) == (True, [b"new", b"mine"])
    assert books.hold(1) == (False, [])
    books.let_go(100)
    assert books.used_bytes == 0 and books.hold(100) == (True, [])


def test_a_sweep_drops_what_it_has_not_seen_and_one_that_failed_does_not() -> None:
    books = Books(None, FakeClock())
    books.add([(b"a", 1), (b"b", 2)])
    books.begin_sweep()
    books.found([(b"c", 4)])
    books.give_up_sweep()
    assert books.used_bytes == 3 and b"c" not in books
    books.begin_sweep()
    books.found([(b"a", 1)])
    books.add([(b"d", 8)])  # stored while it runs, behind where it is
    assert books.end_sweep({}) == 1
    assert books.used_bytes == 9 and b"b" not in books and b"d" in books


def test_uses_are_told_in_an_order_that_goes_on() -> None:
    clock = FakeClock()
    books = Books(100, clock)
    books.add([(b"a", 1), (b"b", 1), (b"c", 1)])
    first = dict(books.order)
    assert first[b"a"] > first[b"b"] > first[b"c"]
    books.touch([b"c", b"nothing"])
    assert books.order[b"c"] > first[b"a"] and b"nothing" not in books.order
    books.forget([b"b"])
    assert books.order[b"b"] is None
