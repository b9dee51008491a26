"""The router's HTTP service."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import signal
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from kvstore import errors
from kvstore.log import get_logger
from kvstore.router import flow
from kvstore.router.instances import Instance, Pool
from kvstore.router.metrics import RouterMetrics
from kvstore.router.settings import RouterSettings
from kvstore.router.upstream import InstanceFailed, Upstream, passed_on

#: A client that takes longer to send its body holds a place for nothing.
_BODY_S: Final = 60.0
_METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_log = get_logger("kvstore.router")


@dataclasses.dataclass(slots=True)
class _Trip:
    """One request on its way; its fields become its log line.

    Attributes:
        status: What the client gets; "gone" if it did not wait.
        prefill: Outcome of the first step, see RouterMetrics.
    """

    path: str
    request_id: str
    status: str = "gone"
    stream: bool = False
    prefill: str = "skipped"
    prefill_url: str = ""
    prefill_s: float | None = None
    decode_url: str = ""
    first_byte_s: float | None = None
    retries: int = 0
    problem: str = ""
    began: float = dataclasses.field(default_factory=time.monotonic)

    def age_s(self) -> float:
        return time.monotonic() - self.began


class Router:
    """See the package. One event loop; `app` is to be run by it.

    Args:
        settings: What it was told.
    """

    def __init__(self, settings: RouterSettings, *, now: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._upstream: Upstream | None = None
        self._prefills = Pool("prefill", settings.prefill, self._look, now=now)
        # Without prefill decode computes the prompt; without decode there is no answer.
        self._decodes = Pool("decode", settings.decode, self._look, last_resort=True, now=now)
        self.metrics = RouterMetrics(self.instances)
        self._running = 0
        self._draining = False

    @property
    def instances(self) -> tuple[Instance, ...]:
        """All of them."""
        return self._prefills.instances + self._decodes.instances

    def app(self) -> web.Application:
        """The service. Starting it looks at every instance once, and then for as long as it runs."""
        app = web.Application(client_max_size=self._settings.body_bytes_max)
        app.router.add_post(flow.CHAT, self._generate)
        app.router.add_post(flow.COMPLETIONS, self._generate)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.cleanup_ctx.append(self._life)
        return app

    def drain(self) -> None:
        """From now on new requests are refused; those that run go on."""
        self._draining = True

    async def _life(self, _app: web.Application) -> AsyncIterator[None]:
        self._upstream = Upstream(self._settings)
        pools = (self._prefills, self._decodes)
        await asyncio.gather(*(pool.look() for pool in pools))
        watching = [asyncio.create_task(pool.watch(self._settings.health_interval_s)) for pool in pools]
        yield
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        await self._upstream.close()

    async def _look(self, instance: Instance) -> None:
        assert self._upstream is not None
        await self._upstream.look(instance)

    # -- requests ------------------------------------------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        trip = _Trip(request.path, request.headers.get("X-Request-Id") or uuid.uuid4().hex)
        if self._draining:
            return self._refused(trip, 503, "this router is about to stop: try again, at another one")
        if self._running >= self._settings.requests_max:
            return self._refused(trip, 429, f"{self._running} requests are running and that is the limit: try again")
        self._running += 1
        self.metrics.running.inc()
        try:
            answer = await self._two_steps(request, trip)
            trip.status = str(answer.status)
            return answer
        finally:  # a client that goes away cancels this, or a write to it fails; then the status stays "gone"
            self._running -= 1
            self.metrics.running.dec()
            self._note_end(trip)

    async def _two_steps(self, request: web.Request, trip: _Trip) -> web.StreamResponse:
        try:
            async with asyncio.timeout(_BODY_S):
                raw = await request.read()
            body = flow.parse_body(raw)
        except flow.BadRequest as error:
            return _error(400, str(error))
        except TimeoutError:
            return _error(408, f"the body was not there after {_BODY_S:.0f} s")
        except web.HTTPRequestEntityTooLarge:
            return _error(413, f"the body has more than {self._settings.body_bytes_max} bytes: see --max-body")
        trip.stream = bool(body.get("stream"))
        headers = passed_on(request.headers)
        headers["X-Request-Id"] = trip.request_id
        handover = None
        if flow.gains_by_prefill(trip.path, body):
            try:
                async with asyncio.timeout(self._settings.prefill_timeout_s):
                    handover = await self._prefill(trip, body, headers, len(raw))
            except TimeoutError:
                trip.prefill = "timeout"
                for instance in self._prefills.instances:
                    if instance.url == trip.prefill_url:
                        instance.note_failure("takes longer than --prefill-timeout")
        step = json.dumps(flow.decode_body(trip.path, body, handover)).encode()
        return await self._decode(request, trip, step, headers)

    async def _prefill(
        self, trip: _Trip, body: Mapping[str, Any], headers: Mapping[str, str], prompt_bytes: int
    ) -> flow.Handover | None:
        """The first step. None where it failed, for whatever reason: the second one does without."""
        assert self._upstream is not None
        step = json.dumps(flow.prefill_body(body)).encode()
        trip.prefill = "none_up"
        began = trip.age_s()
        tried: list[Instance] = []
        while len(tried) <= self._settings.retries and (instance := self._prefills.choose(tried)) is not None:
            if tried:
                self._note_retry(trip, instance)
            tried.append(instance)
            trip.prefill, trip.prefill_url = "failed", instance.url
            try:
                with self._prefills.giving(instance, prompt_bytes):
                    # The time of the whole step is bounded by the caller.
                    async with self._upstream.post(
                        instance, trip.path, step, headers, self._settings.prefill_timeout_s
                    ) as answer:
                        with self._upstream.failures_of(instance):
                            content = await answer.read()
            except InstanceFailed as error:
                trip.problem = str(error)
                instance.note_failure(str(error))
                continue
            if answer.status != 200:
                instance.note_answer()
                trip.prefill, trip.problem = "refused", f"prefill answers {answer.status}"
                return None
            try:
                handover = flow.read_handover(trip.path, json.loads(content))
            except ValueError:
                trip.problem = "prefill answers something that is not JSON"
                instance.note_failure(trip.problem)
                continue
            instance.note_answer()
            trip.prefill = "ok"
            trip.prefill_s = trip.age_s() - began
            self.metrics.prefill_seconds.observe(trip.prefill_s)
            return handover
        return None

    async def _decode(
        self, request: web.Request, trip: _Trip, step: bytes, headers: Mapping[str, str]
    ) -> web.StreamResponse:
        """The second step: the answer of the first decode instance that gives one."""
        assert self._upstream is not None
        failure = InstanceFailed("no decode instance is up")
        tried: list[Instance] = []
        while len(tried) <= self._settings.retries and (instance := self._decodes.choose(tried)) is not None:
            if tried:
                self._note_retry(trip, instance)
            tried.append(instance)
            trip.decode_url = instance.url
            try:
                with self._decodes.giving(instance, 1):
                    async with self._upstream.post(
                        instance, trip.path, step, headers, self._settings.decode_timeout_s
                    ) as answer:
                        # Until its first byte has come nothing is promised to the client.
                        with self._upstream.failures_of(instance):
                            if answer.content_type == "text/event-stream":
                                first = await answer.content.readany()
                            else:
                                first = await answer.read()
                        instance.note_answer()
                        trip.first_byte_s = trip.age_s()
                        self.metrics.first_byte_seconds.observe(trip.first_byte_s)
                        if answer.content_type == "text/event-stream":
                            return await self._relay(request, trip, instance, answer, first)
                        return web.Response(status=answer.status, body=first, headers=_answer_headers(answer))
            except InstanceFailed as error:
                failure = error
                trip.problem = str(error)
                instance.note_failure(str(error))
        if failure.answer is not None:
            status, content_type, content = failure.answer
            return web.Response(status=status, body=content, content_type=content_type)
        return _error(503 if not tried else 502, f"no decode instance has answered: {failure}")

    async def _relay(
        self, request: web.Request, trip: _Trip, instance: Instance, answer: aiohttp.ClientResponse, first: bytes
    ) -> web.StreamResponse:
        """Passes a stream on, as it comes."""
        assert self._upstream is not None
        relayed = web.StreamResponse(status=answer.status, headers=_answer_headers(answer))
        await relayed.prepare(request)
        chunk = first
        while chunk:
            await relayed.write(chunk)
            try:
                with self._upstream.failures_of(instance):
                    chunk = await answer.content.readany()
            except InstanceFailed as error:
                # Too late for another instance. Said in the stream, and shown by an end that is none: a client that
                # knows no such event must not take half an answer for a whole one.
                self.metrics.broken.inc()
                instance.note_failure(str(error))
                trip.problem = f"in the middle: {error}"
                event = {"error": _error_object(502, f"the decode instance failed in the middle: {error}")}
                await relayed.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                if request.transport is not None:
                    request.transport.close()
                return relayed
        await relayed.write_eof()
        return relayed

    # -- small pages ---------------------------------------------------------------------------------------------------

    async def _models(self, request: web.Request) -> web.Response:
        """What the decode instances serve."""
        assert self._upstream is not None
        tried: list[Instance] = []
        while (instance := self._decodes.choose(tried)) is not None:
            tried.append(instance)
            with contextlib.suppress(InstanceFailed):
                status, content_type, content = await self._upstream.get(
                    instance, request.path, passed_on(request.headers)
                )
                return web.Response(status=status, body=content, content_type=content_type)
        return _error(503, "no decode instance is up")

    async def _health(self, _request: web.Request) -> web.Response:
        """200 while requests can be answered: a decode instance is up. Without a prefill instance it says degraded."""
        prefills, decodes = self._prefills.instances, self._decodes.instances
        able = any(instance.up for instance in decodes)
        state = "down"
        if self._draining:
            state = "draining"
        elif able:
            state = "ok" if any(each.up and not each.breaker.paused for each in prefills) else "degraded"
        page: dict[str, Any] = {"status": state}
        for role, instances in (("prefill", prefills), ("decode", decodes)):
            page[role] = [
                {"url": each.url, "up": each.up, "paused": each.breaker.paused, "load": each.load} for each in instances
            ]
        return web.json_response(page, status=200 if able and not self._draining else 503)

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=self.metrics.page(), headers={"Content-Type": _METRICS_TYPE})

    # -- notes ---------------------------------------------------------------------------------------------------------

    def _refused(self, trip: _Trip, status: int, why: str) -> web.Response:
        trip.status, trip.problem = str(status), why
        self._note_end(trip)
        answer = _error(status, why)
        answer.headers["Retry-After"] = "1"
        if status == 503:
            answer.force_close()
        return answer

    def _note_retry(self, trip: _Trip, instance: Instance) -> None:
        trip.retries += 1
        self.metrics.retries.labels(instance.role).inc()

    def _note_end(self, trip: _Trip) -> None:
        self.metrics.requests.labels(trip.path, trip.status).inc()
        self.metrics.prefills.labels(trip.prefill).inc()
        fields = {name: value for name, value in dataclasses.asdict(trip).items() if value not in ("", None)}
        del fields["began"]
        for name, value in fields.items():
            if isinstance(value, float):
                fields[name] = round(value, 4)
        _log.info("request", **fields, total_s=round(trip.age_s(), 4))


async def serve(settings: RouterSettings) -> int:
    """Serves until SIGTERM or Ctrl-C, then lets running requests end.

    Raises:
        ConfigError: the address cannot be listened at.
    """
    router = Router(settings)
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    # A client that goes away cancels its handler, and with it what it has asked of an instance.
    runner = web.AppRunner(router.app(), handler_cancellation=True, shutdown_timeout=settings.drain_s, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, settings.listen.host, settings.listen.port)
        try:
            await site.start()
        except OSError as error:
            raise errors.ConfigError(f"--listen {settings.listen}: {error.strerror}") from error
        address = runner.addresses[0]
        _log.info("listening", address=f"{address[0]}:{address[1]}", prefill=settings.prefill, decode=settings.decode)
        await stopping.wait()
        router.drain()
        await site.stop()
        _log.info("draining", seconds_max=settings.drain_s)
    finally:
        await runner.cleanup()
    _log.info("stopped")
    return 0


def _answer_headers(answer: aiohttp.ClientResponse) -> CIMultiDict[str]:
    headers = passed_on(answer.headers)
    headers["Content-Type"] = answer.headers.get("Content-Type", "application/octet-stream")
    return headers


def _error_object(status: int, message: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "upstream_error"
    return {"message": f"kvstore pd-router: {message}", "type": kind, "param": None, "code": status}


def _error(status: int, message: str) -> web.Response:
    """An error as OpenAI's clients read it."""
    return web.json_response({"error": _error_object(status, message)}, status=status)
