"""Instances and a router on free ports of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from kvstore.router.server import Router
from kvstore.router.settings import router_settings
from kvstore.testing.time import FakeClock
from tests.router.vllm_server import FakeVLLM
from tests.support import PATIENCE_S

LOOK_S = 0.02


@dataclasses.dataclass
class Routed:
    """A router with its instances, and a client of it."""

    router: Router
    server: TestServer
    http: aiohttp.ClientSession
    prefills: list[FakeVLLM]
    decodes: list[FakeVLLM]
    clock: FakeClock

    def url(self, path: str) -> str:
        return str(self.server.make_url(path))

    async def ask(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        """Status and JSON of an answer."""
        async with self.http.post(self.url(path), json=body, **options) as answer:
            return answer.status, await answer.json()

    async def chat(self, text: str = "hello", **fields: Any) -> tuple[int, Any]:
        return await self.ask("/v1/chat/completions", chat_body(text, **fields))

    async def get(self, path: str, **options: Any) -> tuple[int, str]:
        async with self.http.get(self.url(path), **options) as answer:
            return answer.status, await answer.text()

    async def figure(self, line: str) -> float:
        """A sample of /metrics, named as it stands there."""
        _, page = await self.get("/metrics")
        found = [text.rpartition(" ")[2] for text in page.splitlines() if text.rpartition(" ")[0] == line]
        return float(found[0]) if found else 0.0

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                await asyncio.sleep(0.002)


def chat_body(text: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}


Start = Callable[..., Awaitable[Routed]]


@pytest.fixture
async def routed() -> AsyncIterator[Start]:
    """Starts a router with so many instances; further settings and addresses go to the router."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(
            prefills: int = 1,
            decodes: int = 1,
            *,
            more_prefill: tuple[str, ...] = (),
            more_decode: tuple[str, ...] = (),
            **settings: Any,
        ) -> Routed:
            made = []
            for number in range(prefills + decodes):
                made.append(await FakeVLLM(f"instance {number}").start())
                stack.push_async_callback(made[-1].stop)
            chosen = router_settings(
                [*(each.url for each in made[:prefills]), *more_prefill],
                [*(each.url for each in made[prefills:]), *more_decode],
                "127.0.0.1:0",
                **{
                    "health_interval_s": LOOK_S,
                    "health_timeout_s": PATIENCE_S,
                    "prefill_timeout_s": PATIENCE_S,
                    **settings,
                },
            )
            clock = FakeClock()
            router = Router(chosen, now=clock.monotonic)
            server = TestServer(router.app())
            await server.start_server()
            stack.push_async_callback(server.close)
            http = await stack.enter_async_context(aiohttp.ClientSession())
            return Routed(router, server, http, made[:prefills], made[prefills:], clock)

        yield start


@pytest.fixture
def refusing_url() -> Iterator[str]:
    """An address that nobody listens at, and nobody else gets meanwhile."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{holder.getsockname()[1]}"
