"""CopyEngine: what moves a job's bytes between an engine's KV memory and the pool.

A job is a batch of fragments: `size[i]` bytes at `kv[i]` in KV memory belong to `pool[i]` in the mapping of the pool.
The caller computes the addresses with array arithmetic; no engine loops over fragments in Python.

What the caller promises
    * Addresses lie in live memory of the right kind: `kv` in one device's KV tensors, `pool` in the mapping that was
      last given to `use_pool`. Both stay valid, and nobody else writes to the side that is written, until `then` was
      called.
    * The fragments of a job do not overlap each other on the side that is written.
    * All methods but `stats` are called by one thread at a time. On a GPU `store` and `load` are called by the one
      whose current stream is the one that KV memory is written on.

What the engine promises
    * It is asynchronous: `store` and `load` return at once. A store reads KV memory only after everything that was
      queued on the caller's current stream before the call; a load writes only after it. Neither makes that stream
      wait.
    * Jobs of one direction end in the order they were given. Loads never queue behind stores.
    * `then(seconds, error)` is called exactly once for every job, when its last byte is where it belongs, or once it is
      certain that nothing of it will be written any more. `error` is None, or why the bytes on the written side must
      not be used. It is called on a thread of the engine, or inside `poll`, `wait` or `close`; it must not block or
      raise.
    * `seconds` is the time of the copy itself, without what it waited for.
    * A fault of the machine (memory that cannot be registered, no room for staging) costs speed and is in `stats`; it
      is neither raised nor wrong.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Collection
from typing import Any, Protocol

import numpy as np

#: Called when a job is over: seconds, and what went wrong or None.
Then = Callable[[float, BaseException | None], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Fragments:
    """The pieces of one job: uint64 arrays of one length, contiguous. Addresses and bytes.

    Order is free; where the layers of KV memory should arrive one after the other, it is the order of arrival.
    """

    kv: np.ndarray
    pool: np.ndarray
    size: np.ndarray

    def __len__(self) -> int:
        return len(self.size)

    @property
    def size_bytes(self) -> int:
        """Bytes of all of them."""
        return int(self.size.sum())


class Copy(Protocol):
    """A job that was given to an engine."""

    @property
    def over(self) -> bool:
        """Whether its `then` was called."""


class Pool(Protocol):
    """The mapping of the daemon's pool, as `kvstore.arena.ArenaView` shows it."""

    address: int
    size_bytes: int
    populated_bytes: int


@dataclasses.dataclass(slots=True)
class CopyStats:
    """Counts since the engine was made, and where it stands.

    Attributes:
        bytes_by_path: Bytes moved, by the way they went (`cpu`; `staged`, `kernel`, `batch`, `pageable` on CUDA).
        jobs_failed: Jobs that ended with an error.
        registered_bytes: How much of the pool is registered with the GPU now.
        pool_bytes: How large the pool is; 0 while there is none.
        registering: Registration is under way.
        register_error: Why (a part of) the pool could not be registered; empty if it could. Copies then are pageable.
        register_seconds: Time that registering took so far.
    """

    bytes_by_path: dict[str, int] = dataclasses.field(default_factory=dict)
    jobs_failed: int = 0
    registered_bytes: int = 0
    pool_bytes: int = 0
    registering: bool = False
    register_error: str = ""
    register_seconds: float = 0.0


class CopyEngine(abc.ABC):
    """See the module."""

    @abc.abstractmethod
    def use_pool(self, pool: Pool | None) -> None:
        """The pool that the next jobs refer to; None: there is none any more. Keeps the mapping until the next call and
        until the jobs that refer to it are over. Giving the same pool again does nothing.
        """

    @abc.abstractmethod
    def store(self, fragments: Fragments, then: Then, *, beside_compute: bool = False) -> Copy:
        """Copies from KV memory to the pool.

        Args:
            beside_compute: The model computes meanwhile and shall not become slower by it: a way that is less fast, but
                leaves the processor of KV memory alone, is the better one.

        Raises:
            RuntimeError: nothing was begun, and `then` will not be called.
        """

    @abc.abstractmethod
    def load(self, fragments: Fragments, then: Then, *, beside_compute: bool = False) -> Copy:
        """Copies from the pool to KV memory.

        Args:
            beside_compute: As for `store`.

        Raises:
            RuntimeError: nothing was begun, and `then` will not be called.
        """

    def expect_load(self, starts: np.ndarray, size_bytes: int) -> None:  # noqa: B027
        """A load from the pool follows at once, that begins with these stretches of it, each of so many bytes: what can
        be moved before it is known where in KV memory it belongs may be moved. An engine need not do anything.

        The bytes may be read from now on. Who finds that they may not be used after all, or that another load comes
        first, calls `expect_nothing` before the next load.

        Args:
            starts: Addresses, uint64, all of them in the pool.
        """

    def expect_nothing(self) -> None:  # noqa: B027
        """What was read for an expected load is of no use."""

    @abc.abstractmethod
    def poll(self) -> None:
        """Ends the jobs whose bytes have arrived. Never waits. To be called often; nothing else may end a job (see
        watched).
        """

    @abc.abstractmethod
    def wait(self, copies: Collection[Any]) -> None:
        """Returns once these jobs are over."""

    @abc.abstractmethod
    def stats(self) -> CopyStats:
        """A copy of the counts."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends every job, gives memory back and lets go of the pool."""
