"""The servers behind an address: redis-py's pools, one for each node, and who holds which block.

What may take long (connecting, asking for the topology) runs on threads and touches no borrowed buffer.
"""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Final

from redis.backoff import NoBackoff
from redis.cluster import PRIMARY, ClusterNode, NodesManager
from redis.connection import Connection, ConnectionPool, SSLConnection, UnixDomainSocketConnection
from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterDownError,
    InvalidResponse,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as LostConnection
from redis.exceptions import TimeoutError as NoAnswer
from redis.retry import Retry
from redis.sentinel import (
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)

from kvstore.tiers.redis_health import Fault
from kvstore.tiers.redis_url import Kind, RedisAddress
from kvstore.tiers.redis_wire import BulkParser

#: Of the Redis protocol: what all servers and Sentinels speak.
_PROTOCOL: Final = 2
# Without types, or with such as don't fit what is passed on.
_Node: Any = ClusterNode
_Pool: Any = ConnectionPool
_Sentinel: Any = Sentinel
_SentinelPool: Any = SentinelConnectionPool


class NoNode(Exception):
    """Nobody is known to hold a block: the topology was not read yet, or its slot is not covered."""


def is_elsewhere(reply: object) -> bool:
    """Whether a reply says that a block lies on another node."""
    return isinstance(reply, MovedError | AskError | TryAgainError)


def is_full(reply: object) -> bool:
    """Whether a reply says that there is no memory."""
    return isinstance(reply, OutOfMemoryError)


def is_refusal(reply: object) -> bool:
    """Whether an error reply is about the server, not about the key that it was asked for."""
    return isinstance(reply, ClusterDownError | ReadOnlyError | NoPermissionError)


def fault_of(error: BaseException, address: RedisAddress) -> Fault:
    """What an error means."""
    kind = "internal"
    if isinstance(error, AuthenticationError | NoPermissionError):
        kind = "login"
    elif isinstance(error, NoAnswer | TimeoutError):
        kind = "timeout"
    elif isinstance(error, ClusterDownError | RedisClusterException | NoNode):
        kind = "cluster"
    elif isinstance(error, InvalidResponse):
        kind = "protocol"
    elif isinstance(error, LostConnection | OSError):
        kind = "connection"
    elif isinstance(error, ResponseError | RedisError):
        kind = "reply"
    return Fault(kind, address.scrub(f"{type(error).__name__}: {error}"[:300]))


class Servers(abc.ABC):
    """See the module. Thread-safe."""

    @abc.abstractmethod
    def nodes(self) -> list[str]:
        """Names of the nodes that hold blocks; empty until refresh() came through."""

    @abc.abstractmethod
    def node_of(self, tag: bytes) -> str:
        """The node that holds the blocks of a hash tag. Does not block.

        Raises:
            NoNode: see there.
        """

    @abc.abstractmethod
    def refresh(self) -> None:
        """Asks who holds what. Blocks.

        Raises:
            RedisError, OSError: nobody could be asked.
        """

    @abc.abstractmethod
    def moved(self, error: MovedError) -> None:
        """Takes note of a redirection. Does not block."""

    @abc.abstractmethod
    def pool_of(self, node: str) -> Any:
        """Raises: NoNode: it is gone."""

    @abc.abstractmethod
    def close(self) -> None:
        """Closes connections that nobody uses."""

    @contextlib.contextmanager
    def connection(self, node: str) -> Iterator[Any]:
        """A connection of ours alone; closed if anything is raised in between.

        Raises:
            RedisError, OSError, NoNode: it can't be had.
        """
        pool = self.pool_of(node)
        connection = pool.get_connection()
        try:
            yield connection
        except BaseException:
            # There may be replies under way that nobody waits for.
            connection.disconnect()
            raise
        finally:
            pool.release(connection)
            if self.is_gone(node, pool):
                pool.disconnect(inuse_connections=False)

    def is_gone(self, node: str, pool: Any) -> bool:
        """Whether a pool of connections to a node is no longer used."""
        return False


class OneServer(Servers):
    """A single server, or the one that the Sentinels call the master."""

    def __init__(self, name: str, pool: Any, sentinel: Any = None) -> None:
        self._name = name
        self._pool = pool
        self._sentinel = sentinel

    def nodes(self) -> list[str]:
        return [self._name]

    def node_of(self, tag: bytes) -> str:
        return self._name

    def refresh(self) -> None:
        if self._sentinel is not None:
            # Closes idle connections to another master than the one that is named now.
            self._pool.get_master_address()

    def moved(self, error: MovedError) -> None:
        """A lone server of a cluster: nothing to be done."""

    def pool_of(self, node: str) -> Any:
        return self._pool

    def close(self) -> None:
        self._pool.disconnect(inuse_connections=False)
        if self._sentinel is not None:
            self._sentinel.close()


class Cluster(Servers):
    """A cluster; redis-py keeps the map of slots."""

    def __init__(self, hosts: tuple[tuple[str, int], ...], settings: dict[str, Any]) -> None:
        self._hosts = hosts
        self._settings = settings
        self._lock = threading.Lock()
        self._manager: Any = None

    def nodes(self) -> list[str]:
        manager = self._manager
        return [] if manager is None else [node.name for node in manager.get_nodes_by_server_type(PRIMARY)]

    def node_of(self, tag: bytes) -> str:
        manager = self._manager
        if manager is None:
            raise NoNode("the topology of the cluster is not known")
        try:
            name: str = manager.get_node_from_slot(key_slot(tag)).name
        except (RedisError, RedisClusterException) as error:  # the second is none of the first
            raise NoNode(str(error)) from None
        return name

    def refresh(self) -> None:
        with self._lock:
            if self._manager is None:
                self._manager = NodesManager(
                    startup_nodes=[_Node(host, port) for host, port in self._hosts],
                    from_url=True,
                    require_full_coverage=False,
                    **self._settings,
                )
                return
            # Nodes that are known may all be gone, while those of the URL stand for new ones. Given as additional ones,
            # redis-py would open connections to them that nobody can close.
            asked = {node.name: node for node in (_Node(host, port) for host, port in self._hosts)}
            asked |= self._manager.startup_nodes | self._manager.nodes_cache
            self._manager.startup_nodes = asked
            self._manager.initialize(disconnect_startup_nodes_pools=False)
            self._close_but(asked, self._manager.nodes_cache)

    @staticmethod
    def _close_but(nodes: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
        """Closes idle connections to nodes, but those that other nodes use too."""
        used = [node.redis_connection for node in kept.values()]
        for node in nodes.values():
            if node.redis_connection is not None and node.redis_connection not in used:
                node.redis_connection.connection_pool.disconnect(inuse_connections=False)

    def is_gone(self, node: str, pool: Any) -> bool:
        found = None if self._manager is None else self._manager.get_node(node_name=node)
        return found is None or found.redis_connection is None or found.redis_connection.connection_pool is not pool

    def moved(self, error: MovedError) -> None:
        if type(error) is MovedError and self._manager is not None:
            with contextlib.suppress(KeyError):  # a slot that nobody held when the map was read
                self._manager.move_slot(error)

    def pool_of(self, node: str) -> Any:
        manager = self._manager
        found = None if manager is None else manager.get_node(node_name=node)
        if found is None:
            raise NoNode(f"{node} is no node of the cluster")
        if found.redis_connection is None:
            manager.create_redis_connections([found])
        return found.redis_connection.connection_pool

    def close(self) -> None:
        if self._manager is not None:
            # redis-py's own close() leaves the connections to the pools, and these to the garbage collector.
            self._close_but(self._manager.startup_nodes | self._manager.nodes_cache, {})


def make_servers(address: RedisAddress, timeout_s: float, connections: int) -> Servers:
    """Nothing is connected before it is needed.

    Args:
        timeout_s: For connecting, and for each reply while logging in.
        connections: How many threads will ask at once.
    """
    common: dict[str, Any] = {
        "protocol": _PROTOCOL,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "client_name": "kvstore",
    }
    settings = address.login | common | {"parser_class": BulkParser, "max_connections": connections + 2}
    # Who asks decides whether to ask again: the time is short.
    once = {"retry": Retry(NoBackoff(), 0)}
    if address.kind is Kind.CLUSTER:
        return Cluster(address.hosts, settings | {"connection_class": SSLConnection if address.tls else Connection})
    if address.kind is Kind.SENTINEL:
        sentinel_settings = address.sentinel_login | common | once | ({"ssl": True} if address.tls else {})
        sentinel = _Sentinel(list(address.hosts), sentinel_kwargs=sentinel_settings)
        pool = _SentinelPool(
            address.service,
            sentinel,
            connection_class=SentinelManagedSSLConnection if address.tls else SentinelManagedConnection,
            **settings,
            **once,
        )
        return OneServer(address.service, pool, sentinel)
    if address.kind is Kind.UNIX:
        path = address.login["path"]
        return OneServer(path, _Pool(connection_class=UnixDomainSocketConnection, **settings, **once))
    ((host, port),) = address.hosts
    kind = SSLConnection if address.tls else Connection
    pool = _Pool(connection_class=kind, host=host, port=port, **settings, **once)
    return OneServer(f"{host}:{port}", pool)
