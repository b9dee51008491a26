from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from kvstore import log


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class ManualClock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    logging.captureWarnings(False)
    structlog.reset_defaults()


def lines_of(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_pipe_gets_one_json_object_a_line() -> None:
    stream = io.StringIO()
    log.configure(stream=stream)
    log.get_logger("kvstore.daemon").info("populated", size_bytes=7)
    logging.getLogger("grpc").warning("lost %d of %d", 1, 2)
    ours, theirs = lines_of(stream)
    assert (ours["event"], ours["size_bytes"], ours["level"], ours["logger"]) == (
        "populated",
        7,
        "info",
        "kvstore.daemon",
    )
    assert (theirs["event"], theirs["level"], theirs["logger"]) == ("lost 1 of 2", "warning", "grpc")
    assert {"timestamp"} <= ours.keys() & theirs.keys()


def test_a_terminal_gets_readable_lines() -> None:
    stream = Terminal()
    log.configure(stream=stream)
    log.get_logger("kvstore.daemon").info("populated", size_bytes=7)
    assert "populated" in stream.getvalue() and not stream.getvalue().startswith("{")


@pytest.mark.parametrize(("log_format", "is_json"), [("json", True), ("console", False)])
def test_the_form_can_be_forced(log_format: str, is_json: bool) -> None:
    stream = Terminal() if is_json else io.StringIO()
    log.configure(log_format=log_format, stream=stream)
    log.get_logger("a").info("event")
    assert stream.getvalue().startswith("{") is is_json


def test_lines_below_the_level_are_left_out() -> None:
    stream = io.StringIO()
    log.configure(level="warning", stream=stream)
    log.get_logger("a").info("no")
    logging.getLogger("b").info("no")
    log.get_logger("a").warning("yes")
    assert [line["event"] for line in lines_of(stream)] == ["yes"]


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_traceback_tells_no_local_variables(log_format: str) -> None:
    stream = io.StringIO()
    log.configure(log_format=log_format, stream=stream)
    token = "".join(["sec", "ret"])
    try:
        raise ValueError(len(token))
    except ValueError:
        log.get_logger("a").exception("failed")
    assert "ValueError" in stream.getvalue() and "secret" not in stream.getvalue()


def test_a_rate_limited_line_says_how_many_were_left_out() -> None:
    stream, clock = io.StringIO(), ManualClock()
    log.configure(stream=stream)
    limited = log.RateLimited(log.get_logger("a"), every_s=10, clock=clock)
    assert limited.warning("write failed", errno=5)
    clock.now += 9.9
    assert not limited.warning("write failed", errno=5)
    assert not limited.error("write failed", errno=28)
    # Another event, and the same event with another key, have intervals of their own.
    assert limited.info("read failed")
    assert limited.warning("write failed", key="disk 2")
    clock.now += 0.1
    assert limited.warning("write failed", errno=5)
    clock.now += 10
    assert limited.warning("write failed", errno=5)
    suppressed = [(line["event"], line.get("suppressed")) for line in lines_of(stream)]
    assert suppressed == [
        ("write failed", None),
        ("read failed", None),
        ("write failed", None),
        ("write failed", 2),
        ("write failed", None),
    ]


def test_a_rate_limit_remembers_a_bounded_number_of_keys() -> None:
    clock = ManualClock()
    limited = log.RateLimited(structlog.testing.CapturingLogger(), every_s=10, clock=clock)
    for key in range(log.KEYS_MAX + 1):
        assert limited.info("event", key=key)
    assert not limited.info("event", key=log.KEYS_MAX)
    assert limited.info("event", key=0), "the oldest key was forgotten"
