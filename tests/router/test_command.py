"""`kvstore pd-router` as a process."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import aiohttp
import pytest

from kvstore import cli
from kvstore.errors import ConfigError
from kvstore.router.server import serve
from kvstore.router.settings import router_settings
from tests.router.conftest import chat_body
from tests.router.vllm_server import FakeVLLM
from tests.support import PATIENCE_S, clean_environ


@pytest.fixture
def spawned() -> Iterator[list[subprocess.Popen[bytes]]]:
    made: list[subprocess.Popen[bytes]] = []
    yield made
    for process in made:
        if process.poll() is None:
            process.kill()
        process.communicate()


async def test_serves_and_drains_on_sigterm(spawned: list[subprocess.Popen[bytes]]) -> None:
    prefill, decode = await FakeVLLM("p").start(), await FakeVLLM("d").start()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "kvstore", "pd-router", "--prefill", prefill.url, "--decode", decode.url),
            *("--listen", "127.0.0.1:0", "--log-format", "json"),
        ],
        stderr=subprocess.PIPE,
        env=clean_environ(),
    )
    spawned.append(process)
    lines: list[dict[str, object]] = []

    def read_until(event: str) -> dict[str, object]:
        assert process.stderr is not None
        while not lines or lines[-1]["event"] != event:
            line = process.stderr.readline()
            assert line, lines
            lines.append(json.loads(line))
        return lines[-1]

    try:
        async with asyncio.timeout(PATIENCE_S):
            address = (await asyncio.to_thread(read_until, "listening"))["address"]
            decode.gate.clear()
            async with aiohttp.ClientSession() as http:
                url = f"http://{address}/v1/chat/completions"
                async with http.post(url, json=chat_body(stream=True)) as answer:
                    await answer.content.readuntil(b"\n\n")
                    process.send_signal(signal.SIGTERM)
                    await asyncio.to_thread(read_until, "draining")
                    with pytest.raises(aiohttp.ClientConnectorError):
                        await http.post(url, json=chat_body())
                    assert process.poll() is None
                    decode.gate.set()
                    assert (await answer.read()).endswith(b"[DONE]\n\n")
            request = await asyncio.to_thread(read_until, "request")
            assert request["status"] == "200" and request["prefill"] == "ok" and request["decode_url"] == decode.url
            await asyncio.to_thread(read_until, "stopped")
            assert await asyncio.to_thread(process.wait, PATIENCE_S) == cli.ExitCode.OK
    finally:
        await prefill.stop()
        await decode.stop()


def test_an_address_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=address):
            asyncio.run(serve(router_settings(["http://127.0.0.1:1"], ["http://127.0.0.1:1"], address)))


def test_what_to_install_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["pd-router", "--prefill", "http://p", "--decode", "http://d"]) == cli.ExitCode.USAGE
    assert "pip install 'kvstore-offload[router]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--decode", "http://d"], "--prefill"),
        (["--prefill", "p:1", "--decode", "http://d"], "http://HOST:PORT"),
        (["--prefill", "http://p", "--decode", "http://d", "--max-body", "many"], "--max-body"),
        (["--prefill", "http://p", "--decode", "http://d", "--retries", "-1"], "--retries"),
    ],
)
def test_flags_that_cannot_be(capsys: pytest.CaptureFixture[str], arguments: list[str], part: str) -> None:
    assert cli.main(["pd-router", *arguments]) == cli.ExitCode.USAGE
    assert part in capsys.readouterr().err
