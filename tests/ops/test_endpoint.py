from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.endpoint import Endpoint, EndpointKind, default_endpoint, parse_endpoint
from kvstore.errors import InvalidRequest


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("unix:/x", "unix:/x"),
        ("unix:///x", "unix:/x"),
        ("/x/y.sock", "unix:/x/y.sock"),
        (" unix:/x \n", "unix:/x"),
        ("cache-1.lan:7070", "cache-1.lan:7070"),
        ("tcp://cache:7070", "cache:7070"),
        ("127.0.0.1:0", "127.0.0.1:0"),
        ("[::1]:7070", "[::1]:7070"),
        ("tcp://[2001:db8::1]:7070", "[2001:db8::1]:7070"),
    ],
)
def test_accepted_forms(text: str, target: str) -> None:
    endpoint = parse_endpoint(text)
    assert endpoint.grpc_target == target
    assert parse_endpoint(str(endpoint)) == endpoint


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no port"),
        ("host", "no port"),
        ("host:", "not a port"),
        ("host:http", "not a port"),
        ("host:65536", "not a port"),
        ("host:²", "not a port"),
        (":7070", "no host"),
        ("-host:7070", "not a host name"),
        ("ho st:7070", "not a host name"),
        ("::1:7070", "in brackets"),
        ("[host]:7070", "not an IPv6 address"),
        ("http://host:7070", "not a scheme"),
        ("unix:", "absolute"),
        ("unix:x.sock", "absolute"),
        ("unix://host/x", "absolute"),
        ("/folder/", "names no file"),
        ("/a\0b", "names no file"),
        ("/" + "x" * 107, "108 bytes"),
    ],
)
def test_anything_else_is_refused_in_one_line_that_names_the_accepted_forms(text: str, why: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_endpoint(text)
    message = str(refused.value)
    assert why in message
    assert "unix:/path" in message and "HOST:PORT" in message
    assert len(message.splitlines()) == 1


@given(st.text(max_size=40))
def test_any_text_is_an_endpoint_or_a_refusal(text: str) -> None:
    try:
        endpoint = parse_endpoint(text)
    except InvalidRequest:
        return
    assert parse_endpoint(str(endpoint)) == endpoint


@pytest.mark.parametrize(
    ("text", "loopback"),
    [
        ("unix:/x", True),
        ("localhost:1", True),
        ("127.8.0.1:1", True),
        ("[::1]:1", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("10.0.0.1:1", False),
        # A name can come to mean anything; it is not looked up.
        ("localhost.example:1", False),
    ],
)
def test_what_other_machines_can_reach(text: str, loopback: bool) -> None:
    assert parse_endpoint(text).is_loopback is loopback


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "unix:/run/kvstore/kvstore.sock"),
        ({"XDG_RUNTIME_DIR": "/run/user/7"}, "unix:/run/user/7/kvstore/kvstore.sock"),
        ({"XDG_RUNTIME_DIR": "relative"}, "unix:/run/kvstore/kvstore.sock"),
        ({"XDG_RUNTIME_DIR": "/run/user/7", "KVSTORE_ENDPOINT": ""}, "unix:/run/user/7/kvstore/kvstore.sock"),
        ({"XDG_RUNTIME_DIR": "/run/user/7", "KVSTORE_ENDPOINT": "host:7070"}, "host:7070"),
    ],
)
def test_default_endpoint(environ: dict[str, str], expected: str) -> None:
    assert str(default_endpoint(environ)) == expected


def test_a_wrong_variable_is_named() -> None:
    with pytest.raises(InvalidRequest, match=r"\$KVSTORE_ENDPOINT: 'host' is not an endpoint"):
        default_endpoint({"KVSTORE_ENDPOINT": "host"})


def test_an_endpoint_is_a_value() -> None:
    assert {parse_endpoint("unix:/x"), parse_endpoint("/x")} == {Endpoint(EndpointKind.UNIX, path="/x")}
    with pytest.raises(AttributeError):
        parse_endpoint("/x").path = "/y"  # type: ignore[misc]
