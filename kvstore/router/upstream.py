"""Calls of instances, and what their failures mean."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Final

import aiohttp
from multidict import CIMultiDict, CIMultiDictProxy

from kvstore import log
from kvstore.router.instances import Instance
from kvstore.router.settings import RouterSettings

#: Answers after which another instance is asked: this one is broken, overloaded or about to stop. Every other status is
#: an answer.
RETRIED: Final = frozenset({500, 502, 503, 504})
#: Shorter than the 5 s after which vLLM's server closes an idle connection, so that no request meets a closing one.
_KEEP_ALIVE_S: Final = 2.0
#: Headers of one connection, not of the request; and those that are written anew for the changed body.
_OF_A_CONNECTION: Final = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection"),
        *("te", "trailer", "transfer-encoding", "upgrade", "host", "expect", "date", "server"),
        *("content-length", "content-encoding", "content-type", "accept-encoding"),
    }
)


class InstanceFailed(Exception):
    """An instance could not answer; the same request may be sent to another one.

    Attributes:
        answer: What it said, where it answered at all: status, content type, body.
    """

    def __init__(self, why: str, answer: tuple[int, str, bytes] | None = None) -> None:
        super().__init__(why)
        self.answer = answer


def passed_on(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """The headers that go with a request or an answer to its other side."""
    dropped = _OF_A_CONNECTION | {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in dropped)


class Upstream:
    """The client side of the router: one session for all instances. Event loop only."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._session = aiohttp.ClientSession(
            # Their number is bounded by that of the requests.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=settings.connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept-Encoding": "identity"},
        )
        self._rarely = log.RateLimited(log.get_logger("kvstore.router"))

    async def close(self) -> None:
        await self._session.close()

    async def look(self, instance: Instance) -> None:
        """Asks an instance how it is, and notes it there."""
        try:
            async with asyncio.timeout(self._settings.health_timeout_s):
                async with self._session.get(f"{instance.url}/health", allow_redirects=False) as answer:
                    if answer.status == 200:
                        instance.note_well()
                    else:
                        instance.note_down(f"/health answers {answer.status}")
        except aiohttp.ClientConnectorError as error:
            instance.note_down(str(error))
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            instance.note_silent(str(error) or "no answer to /health in time")

    @contextlib.asynccontextmanager
    async def post(
        self, instance: Instance, path: str, body: bytes, headers: Mapping[str, str], silence_s: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Posts a request. Leaving the block early, by an exception or cancelled, closes the connection, and vLLM ends
        the request.

        Raises:
            InstanceFailed: on entering, where the instance cannot be reached, is silent or answers with one of RETRIED.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._settings.connect_timeout_s, sock_read=silence_s)
        with self.failures_of(instance):
            answer = await self._session.post(
                f"{instance.url}{path}",
                data=body,
                headers={**headers, "Content-Type": "application/json"},
                timeout=timeout,
                allow_redirects=False,
            )
        try:
            if answer.status in RETRIED:
                with self.failures_of(instance):
                    content = await answer.read()
                raise InstanceFailed(f"answers {answer.status}", (answer.status, answer.content_type, content))
            yield answer
        finally:
            if answer.content.at_eof():
                answer.release()
            else:
                answer.close()

    @contextlib.contextmanager
    def failures_of(self, instance: Instance) -> Iterator[None]:
        """Turns what goes wrong with an instance in the block into InstanceFailed, and notes it there."""
        try:
            yield
        except aiohttp.ClientConnectorError as error:
            instance.note_down(str(error))
            raise InstanceFailed(str(error)) from error
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            self._rarely.warning("instance failed", key=instance.url, role=instance.role, url=instance.url, why=why)
            raise InstanceFailed(why) from error

    async def get(self, instance: Instance, path: str, headers: Mapping[str, str]) -> tuple[int, str, bytes]:
        """Status, content type and body of a small page.

        Raises:
            InstanceFailed: there is none.
        """
        timeout = aiohttp.ClientTimeout(
            total=self._settings.connect_timeout_s + self._settings.health_timeout_s,
            sock_connect=self._settings.connect_timeout_s,
        )
        with self.failures_of(instance):
            async with self._session.get(
                f"{instance.url}{path}", headers=headers, timeout=timeout, allow_redirects=False
            ) as answer:
                page: tuple[int, str, Any] = (answer.status, answer.content_type, await answer.read())
        if page[0] in RETRIED:
            raise InstanceFailed(f"answers {page[0]}", page)
        return page
