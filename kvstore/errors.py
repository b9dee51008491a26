"""Everything that can go wrong, as one tree. Each leaf says what the caller should do.

::

    KVStoreError
    ├── RetryLater            nothing is wrong with the request; the same call may succeed later
    │   ├── DaemonUnavailable     no daemon answers at the endpoint
    │   ├── DeadlineExceeded      the daemon did not answer in time
    │   ├── StaleGeneration       the pool was replaced by a restart; attach again (Client does so by itself)
    │   └── Draining              the daemon is about to stop
    ├── CallerMistake         the same call will fail again; the message says what to change
    │   ├── InvalidRequest        a field is missing or malformed
    │   ├── SizeMismatch          a block has another size than its namespace says; both are named
    │   ├── LimitExceeded         more than a stated limit; the limit is named
    │   ├── UnknownNamespace      never opened, or opened in an earlier life of the daemon
    │   ├── UnknownSession        never attached, or ended
    │   ├── AccessDenied          wrong or missing token
    │   ├── NoMapping             this call needs the shared mapping and the client has none
    │   ├── ForkedClient          a client was carried over a fork
    │   ├── ClientClosed          the client was closed
    │   └── ConfigError           a setting is unknown or impossible
    ├── EndOfPipe             the sender of a pipe has closed it, and everything was received
    ├── PipeBroken            tensors of a pipe are lost, or its sender ended without closing it
    ├── AlreadyRunning        another daemon holds the socket; its pid is named
    └── Damage                bytes changed under a reader; they were not handed out

A miss is not an error: reads answer with the leading run that is there, which may be empty.
"""

from __future__ import annotations


class KVStoreError(Exception):
    """Base of every error this package raises on purpose."""


class RetryLater(KVStoreError):
    """Nothing is wrong with the request; the same call may succeed later."""


class DaemonUnavailable(RetryLater):
    """No daemon answers at the endpoint."""


class DeadlineExceeded(RetryLater):
    """The daemon did not answer in time."""


class StaleGeneration(RetryLater):
    """The pool that the call speaks of is gone: the daemon was restarted."""


class Draining(RetryLater):
    """The daemon is about to stop and takes no new work."""


class CallerMistake(KVStoreError):
    """The same call will fail again; the message says what to change."""


class InvalidRequest(CallerMistake, ValueError):
    """A field is missing or malformed."""


class SizeMismatch(CallerMistake, ValueError):
    """A block has another size than its namespace says."""


class LimitExceeded(CallerMistake, ValueError):
    """More of something than a stated limit allows; the message names the limit."""


class UnknownNamespace(CallerMistake, LookupError):
    """The namespace was never opened in this life of the daemon."""


class UnknownSession(CallerMistake, LookupError):
    """The session was never attached, or has ended."""


class AccessDenied(CallerMistake, PermissionError):
    """The token is wrong or missing."""


class NoMapping(CallerMistake):
    """The call needs the shared mapping and this client has none."""


class ForkedClient(CallerMistake, RuntimeError):
    """A client was carried over a fork; neither gRPC nor the session survives one. Connect in the child."""


class ClientClosed(CallerMistake, RuntimeError):
    """The client was closed."""


class ConfigError(CallerMistake, ValueError):
    """A setting is unknown or impossible; the message names it and what to write."""


class EndOfPipe(KVStoreError):
    """The sender of a pipe has closed it, and everything that it sent was received."""


class PipeBroken(KVStoreError):
    """What was sent through a pipe is not all there, or cannot be known to be: the message says why."""


class AlreadyRunning(KVStoreError):
    """Another daemon holds the socket.

    Attributes:
        holder_pid: pid of the daemon that holds it, or None where it cannot be read.
    """

    def __init__(self, message: str, holder_pid: int | None = None) -> None:
        super().__init__(message)
        self.holder_pid = holder_pid


class Damage(KVStoreError):
    """Bytes changed under a reader; they were not handed out."""
