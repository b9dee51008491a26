"""Composition root: builds the daemon, starts it, drains it, stops it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import resource
import secrets
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

import kvstore
from kvstore.admin import AdminClient
from kvstore.arena import Arena
from kvstore.blocks import POOL_LIFE_BYTES
from kvstore.clock import Clock, SystemClock
from kvstore.config import Settings
from kvstore.data_port import DataPort
from kvstore.endpoint import Endpoint, EndpointKind
from kvstore.errors import AlreadyRunning, ConfigError, KVStoreError
from kvstore.framed import FramedConnection
from kvstore.handoff import SUFFIX as HANDOFF_SUFFIX
from kvstore.handoff_server import HandoffServer
from kvstore.hierarchy import Hierarchy
from kvstore.lockfile import SocketLock
from kvstore.log import get_logger
from kvstore.looking import MAY_LOOK, LookingSelector
from kvstore.machine import read_machine
from kvstore.metrics import MetricsServer
from kvstore.population import Populator
from kvstore.service import AdminService, EngineService, Gate, local_methods
from kvstore.stats import Stats, hierarchy_stats
from kvstore.tier import Tier
from kvstore.transfers import WritePolicy
from kvstore.wire.tls import Tls
from kvstore.wire.v1 import admin_pb2, admin_pb2_grpc, engine_pb2, engine_pb2_grpc

_SERVICES: Final = tuple(
    module.DESCRIPTOR.services_by_name[name].full_name
    for module, name in ((engine_pb2, "Engine"), (admin_pb2, "Admin"))
)

#: Least time that a stopping daemon gives what has to be copied down.
_SETTLE_S: Final = 1.0
#: How long the loop looks for the next frame before it sleeps: an engine that loads one block of 8 MiB gives its lease
#: back within 0.35 ms, and its next call comes right behind. With ten calls a second it takes half a percent of a CPU.
_LOOK_S: Final = 0.0005
#: Descriptors of each session: its gRPC connection, that of its mapping, a pidfd, and one over.
_SESSION_FILES: Final = 4
#: Of everything else: tiers, listeners, data port.
_OTHER_FILES: Final = 2048

log = get_logger("kvstore.daemon")


def run(settings: Settings) -> int:
    """Runs a daemon until SIGTERM or SIGINT. Returns the exit code.

    Raises:
        AlreadyRunning: another daemon holds a socket; it is named.
        ConfigError: a setting that only shows to be impossible now.
    """
    _tune_garbage_collector()
    _raise_file_limit(settings.limits.sessions_max)
    with contextlib.ExitStack() as stack:
        for endpoint in settings.listen:
            if endpoint.is_unix:
                stack.enter_context(SocketLock(endpoint.path))
        selector = LookingSelector(_LOOK_S if MAY_LOOK else 0.0, SystemClock())
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
            return runner.run(_Daemon(settings, selector.expect).run())


def _tune_garbage_collector() -> None:
    """A full collection walks every block of the directory (0.5 s for a million) and finds nothing: blocks are freed by
    their reference counts. What gRPC leaves in cycles is young, so the two younger generations are enough.
    """
    gc.freeze()
    gc.set_threshold(2_000, 5, 1_000_000)


def _raise_file_limit(sessions_max: int) -> None:
    """As many descriptors as sessions_max needs, if this process may have them. The usual limit of 1024 is there for
    programs that use select(), and ends at 340 clients.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = sessions_max * _SESSION_FILES + _OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class _Daemon:
    """One life of a daemon."""

    def __init__(self, settings: Settings, expect_more: Callable[[], None]) -> None:
        self._settings = settings
        self._expect_more = expect_more
        self._clock = SystemClock()
        self._started = self._clock.monotonic()
        self._generation = secrets.token_bytes(POOL_LIFE_BYTES)
        self._arena = Arena(settings.cpu_bytes, settings.hugepages)
        self._tiers = _tiers(settings, self._clock)
        self._hierarchy = Hierarchy(
            self._arena,
            self._clock,
            self._tiers,
            WritePolicy(settings.disk_write_policy),
            keepers=[tier for tier in self._tiers if tier.name == "disk" and settings.disk_keep_promoted],
        )
        self._gate = Gate(settings.read_token())
        unix = next((endpoint for endpoint in settings.listen if endpoint.is_unix), None)
        limits = settings.limits
        self._engine = EngineService(
            self._hierarchy,
            self._gate,
            generation=self._generation,
            block_size=settings.block_size,
            gds=settings.gds,
            handoff_path=unix.path + HANDOFF_SUFFIX if unix else "",
            keys_max=limits.keys_max,
            sessions_max=limits.sessions_max,
            wait_s_max=limits.wait_s_max,
            data_address=lambda: str(self._data_port.address) if self._data_port is not None else "",
        )
        self._admin = AdminService(self._hierarchy, self._gate, stats=lambda: json.dumps(self.stats()), ping=self._ping)
        self._listening: list[Endpoint] = []
        self._hurried = False
        self._tls = _tls(settings)
        self._data_port = self._make_data_port()
        self._handoff = HandoffServer(
            self._arena.memory.fd,
            self._arena.epochs_fd,
            self._arena.size_bytes,
            self._engine.mapping_opened,
            self._engine.mapping_closed,
            self._framed_connection,
        )

    async def run(self) -> int:
        """Serves until a signal, then drains and stops. A second signal ends the draining."""
        loop = asyncio.get_running_loop()
        stopping = asyncio.Event()

        def stop() -> None:
            self._hurried = stopping.is_set()
            stopping.set()

        # What has been opened is closed, the last one first, also where the next one cannot be had.
        async with contextlib.AsyncExitStack() as opened:
            # Before anybody is told that this daemon is there: a folder that belongs to another one ends it here. Large
            # indexes are read afterwards.
            for tier in self._tiers:
                await tier.open()
                opened.push_async_callback(tier.close)
            self._hierarchy.namespaces.adopt()
            measuring = loop.create_task(self._look_below())
            opened.push_async_callback(_ended, measuring)
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, stop)
            server = grpc.aio.server(
                options=(
                    ("grpc.max_receive_message_length", self._settings.limits.message_bytes_max),
                    ("grpc.max_send_message_length", -1),
                    ("grpc.so_reuseport", 0),
                    # Clients ping every 10 s while idle, see kvstore/wire/channel.py.
                    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
                    ("grpc.keepalive_time_ms", 10_000),
                    ("grpc.keepalive_timeout_ms", 10_000),
                )
            )
            engine_pb2_grpc.add_EngineServicer_to_server(self._engine, server)
            admin_pb2_grpc.add_AdminServicer_to_server(self._admin, server)
            health_service = health.aio.HealthServicer()  # type: ignore[attr-defined]
            health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
            reflection.enable_server_reflection((*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
            for endpoint in self._settings.listen:
                self._listening.append(self._listen(server, endpoint))
                if endpoint.is_unix:
                    opened.callback(Path(endpoint.path).unlink, missing_ok=True)
            opened.push_async_callback(self._handoff.close)
            if self._data_port is not None:
                self._data_port.open()
                opened.push_async_callback(self._data_port.close)
            if self._settings.metrics_listen is not None:
                opened.callback(self._serve_metrics(loop, self._settings.metrics_listen).close)
            await server.start()
            opened.push_async_callback(server.stop, grace=1.0)
            for endpoint in self._listening:
                if endpoint.is_unix:
                    os.chmod(endpoint.path, 0o600)
                    self._handoff.listen(endpoint.path + HANDOFF_SUFFIX)
            for name in (*_SERVICES, ""):
                await health_service.set(name, health_pb2.HealthCheckResponse.SERVING)
            self._tell_ready()
            opened.callback(self._populate(loop).stop)
            await stopping.wait()
            await health_service.enter_graceful_shutdown()
            await self._drain()
        # One more signal is too late to change anything, and must not look like a crash.
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)
        log.info("stopped")
        return 0

    async def _look_below(self) -> None:
        """What is found out about the tiers once their indexes were read."""
        await self._hierarchy.transfers.measure()
        disks = [tier.stats() for tier in self._tiers if tier.name == "disk"]
        more_bytes = sum(disk["books_bytes_max"] - disk["books_bytes"] for disk in disks)
        on_hugetlb = self._arena.memory.backing.kind == "hugetlb"
        pool_bytes = 0 if on_hugetlb else self._arena.size_bytes - self._arena.populated_bytes
        room_bytes = read_machine().room_bytes - pool_bytes
        if more_bytes > max(0, room_bytes):
            log.warning(
                "the books of a full disk will not fit into memory: lower --disk-bytes or --cpu-bytes",
                books_bytes_more=more_bytes,
                room_bytes=room_bytes,
            )

    def _tell_ready(self) -> None:
        log.info(
            "ready",
            listen=[str(endpoint) for endpoint in self._listening],
            pool_bytes=self._arena.size_bytes,
            backing=self._arena.memory.backing.kind,
            block_size=self._settings.block_size,
            start_s=round(self._clock.monotonic() - self._started, 3),
        )
        if self._arena.memory.backing.kind == "4k" and self._settings.hugepages == "auto":
            log.warning(
                "the pool is on 4 KiB pages: first touch is 4x slower, disk 2x", why=self._arena.memory.backing.note
            )

    def _framed_connection(self) -> FramedConnection:
        limit = self._settings.limits.message_bytes_max
        methods = local_methods(self._engine, self._admin)
        return FramedConnection(methods, limit, self._gate.count_error, self._expect_more)

    def _listen(self, server: Any, endpoint: Endpoint) -> Endpoint:
        """Opens one listener; with the port that was chosen where 0 was asked."""
        before = os.umask(0o077)
        try:
            if self._tls is None or endpoint.is_unix:
                port = server.add_insecure_port(endpoint.grpc_target)
            else:
                port = server.add_secure_port(endpoint.grpc_target, self._tls.server_credentials())
        except RuntimeError as error:
            holder = self._who_is(endpoint)
            if holder is not None:
                raise AlreadyRunning(f"another daemon (pid {holder}) listens on {endpoint}", holder) from error
            raise ConfigError(
                f"--listen {endpoint}: cannot listen there (taken by another program?): {error}"
            ) from error
        finally:
            os.umask(before)
        if endpoint.is_unix:
            return endpoint
        return Endpoint(EndpointKind.TCP, host=endpoint.host, port=port)

    def _who_is(self, endpoint: Endpoint) -> int | None:
        """pid of the daemon at an endpoint, if it is one and lets us ask."""
        tls = Tls(self._settings.tls_ca) if self._tls is not None else None
        with contextlib.suppress(KVStoreError):
            with AdminClient(str(endpoint), self._settings.read_token(), 1.0, tls) as client:
                return client.ping().pid
        return None

    def _make_data_port(self) -> DataPort | None:
        """What stands beside the listeners on HOST:PORT."""
        control = self._settings.first_tcp
        if control is None:
            return None
        return DataPort(
            self._hierarchy,
            self._arena.memory,
            self._generation,
            self._settings.data_listen or Endpoint(EndpointKind.TCP, host=control.host, port=0),
            self._tls.server_context() if self._tls is not None else None,
            congestion_choice=self._settings.data_congestion,
        )

    def _populate(self, loop: asyncio.AbstractEventLoop) -> Populator:
        progress = _progress_bar(self._arena.size_bytes)

        def add(length: int) -> None:
            self._hierarchy.add_populated(length)
            self._engine.tell()
            progress(length)
            if self._arena.populated:
                self._read_huge_bytes(loop)

        def fail(error: MemoryError) -> None:
            self._hierarchy.end_population()
            log.error("the pool is smaller than asked", populated_bytes=self._arena.populated_bytes, why=str(error))

        def in_loop(function: Callable[[Any], None]) -> Callable[[Any], None]:
            def call(argument: Any) -> None:
                with contextlib.suppress(RuntimeError):  # the loop has closed: nobody needs to know any more
                    loop.call_soon_threadsafe(function, argument)

            return call

        populator = Populator(self._arena.memory, self._settings.populate_threads, in_loop(add), in_loop(fail))
        populator.start()
        return populator

    def _read_huge_bytes(self, loop: asyncio.AbstractEventLoop) -> None:
        """Asks the kernel once what pages it gave, off the loop: it walks the page tables for that."""

        def told(future: asyncio.Future[int]) -> None:
            if future.cancelled() or future.exception() is not None:
                return
            self._arena.huge_bytes = future.result()
            log.info("populated", pool_bytes=self._arena.size_bytes, huge_bytes=self._arena.huge_bytes)

        loop.run_in_executor(None, self._arena.memory.huge_bytes).add_done_callback(told)

    async def _drain(self) -> None:
        """Takes no new work and waits for what is held, at most drain_s. What has to be copied down goes at once: who
        started this daemon may not wait as long for its end.
        """
        self._hierarchy.draining = True
        self._hierarchy.wake_all()
        self._engine.tell()
        deadline = self._clock.monotonic() + self._settings.drain_s
        held = self._held()
        log.info("draining", leases=held[0], reserved_slots=held[1], drain_s=self._settings.drain_s)
        copying = asyncio.create_task(self._hierarchy.settle(max(_SETTLE_S, self._settings.drain_s)))
        while any(held) and self._clock.monotonic() < deadline and not self._hurried:
            await asyncio.sleep(0.02)
            held = self._held()
        copying.cancel()
        await asyncio.wait([copying])
        # What was stored meanwhile, too.
        left = _SETTLE_S if self._hurried else max(_SETTLE_S, deadline - self._clock.monotonic())
        if not await self._hierarchy.settle(left):
            log.warning("not every block was copied down", queued_bytes=self._hierarchy.transfers.queued_bytes)
        if any(held):
            log.warning("stopping although something is held", leases=held[0], reserved_slots=held[1])

    def _held(self) -> tuple[int, int]:
        sessions = list(self._hierarchy.sessions)
        return sum(len(session.leases) for session in sessions), sum(len(session.reserved) for session in sessions)

    def _serve_metrics(self, loop: asyncio.AbstractEventLoop, endpoint: Endpoint) -> MetricsServer:
        async def read() -> Stats:
            return self.stats()

        def read_from_thread() -> Stats:
            # The books belong to the loop, and the metrics server answers in threads of its own.
            return asyncio.run_coroutine_threadsafe(read(), loop).result(timeout=5.0)

        return MetricsServer(endpoint, read_from_thread)

    def _ping(self) -> admin_pb2.PingReply:
        return admin_pb2.PingReply(
            generation=self._generation,
            version=kvstore.__version__,
            pid=os.getpid(),
            uptime_s=self._clock.monotonic() - self._started,
        )

    def stats(self) -> Stats:
        """Everything `kvstore stats` shows. On the loop."""
        return {
            "version": kvstore.__version__,
            "generation": self._generation.hex(),
            "pid": os.getpid(),
            "uptime_s": round(self._clock.monotonic() - self._started, 3),
            "state": "draining" if self._hierarchy.draining else "ready",
            "block_size": self._settings.block_size,
            "listen": [str(endpoint) for endpoint in self._listening],
            **hierarchy_stats(self._hierarchy),
            **({"data_port": self._data_port.stats()} if self._data_port is not None else {}),
            "calls": dict(self._gate.calls),
            "call_seconds": {name: round(seconds, 6) for name, seconds in self._gate.seconds.items()},
            "errors": dict(self._gate.errors),
        }


def _tls(settings: Settings) -> Tls | None:
    """What listeners on HOST:PORT show, and ask of clients."""
    if settings.tls_cert is None:
        return None
    return Tls(settings.tls_ca if settings.tls_clients == "verified" else None, settings.tls_cert, settings.tls_key)


def _tiers(settings: Settings, clock: Clock) -> list[Tier]:
    """What the settings put below the pool, in their order."""
    make = {"disk": _disk_tier, "redis": _redis_tier}
    tiers = [make[kind](settings, clock) for kind in settings.tier_order]
    return [*tiers, _peer_tier(settings, clock)] if settings.peer else tiers


# Imports stand in these three, so that a daemon without a tier starts without its libraries.


def _disk_tier(settings: Settings, clock: Clock) -> Tier:
    from kvstore.tiers.disk import DiskTier
    from kvstore.tiers.striped import StripedTier

    assert settings.disk_bytes is not None
    if len(settings.disk_dir) == 1:
        return DiskTier(settings.disk_dir[0], settings.disk_bytes, clock)
    parts = [
        DiskTier(folder, settings.disk_bytes, clock, name=f"disk{index}")
        for index, folder in enumerate(settings.disk_dir)
    ]
    return StripedTier("disk", parts)


def _redis_tier(settings: Settings, clock: Clock) -> Tier:
    from kvstore.tiers.redis import open_redis_tier

    assert settings.redis_url is not None
    return open_redis_tier(
        settings.redis_url,
        clock,
        capacity_bytes=settings.redis_bytes,
        key_prefix=settings.redis_key_prefix,
        ttl_s=settings.redis_ttl_s,
        connections=settings.redis_connections,
        deadline_s=settings.redis_deadline_s,
    )


def _peer_tier(settings: Settings, clock: Clock) -> Tier:
    from kvstore.tiers.peer import PeerTier

    return PeerTier(
        settings.peer,
        clock,
        token=settings.read_token(),
        tls=Tls(settings.tls_ca, settings.tls_cert, settings.tls_key) if settings.tls_cert is not None else None,
        deadline_s=settings.peer_deadline_s,
        congestion_choice=settings.data_congestion,
    )


async def _ended(task: asyncio.Task[None]) -> None:
    """Stops a task that runs beside the service."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled() and (failure := task.exception()) is not None:
        log.error("what is below the pool was not looked at", exc_info=failure)


def _progress_bar(total_bytes: int) -> Callable[[int], None]:
    """Shows population on a terminal; nothing in a pipe."""
    if not sys.stderr.isatty():
        return lambda length: None
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    progress = Progress(
        TextColumn("populating the pool"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task = progress.add_task("", total=total_bytes)
    progress.start()

    def advance(length: int) -> None:
        progress.advance(task, length)
        if progress.finished:
            progress.stop()

    return advance
