"""The namespaces that are known in this life of the daemon. Owned by the hierarchy's thread."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from kvstore.blocks import DIGEST_BYTES, check_block_bytes, digest_of_identity, parse_identity
from kvstore.directory import Keyspace, NamespaceEntry
from kvstore.errors import InvalidRequest, LimitExceeded, SizeMismatch, UnknownNamespace
from kvstore.log import RateLimited, get_logger
from kvstore.tier import Tier, TierNamespace

#: Namespaces in one life of the daemon. Each costs about a kilobyte; a client that makes one per request is mistaken.
NAMESPACES_MAX: Final = 4096
#: Bytes of a namespace's text. A model of 200 layers with long names has 20 kB.
NAMESPACE_TEXT_BYTES_MAX: Final = 256 << 10
#: KV-cache groups of one namespace. The largest hybrid model known has 12.
GROUPS_MAX: Final = 64
#: Settings in which engines of one fleet differ by mistake rather than on purpose.
_EASILY_LEFT_OUT: Final = ("block_size", "hash_algo", "hash_seed", "layout", "tokens_per_hash")


class Namespaces:
    """See the module.

    Args:
        tiers: Told of each namespace, and asked for those that they have blocks of.

    Attributes:
        entries: All of them, by digest.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers = tiers
        self._log = RateLimited(get_logger("kvstore.namespaces"))
        #: By one of those settings and a digest of all others: the first namespace of that kind, and its value.
        self._alike: dict[tuple[str, bytes], tuple[bytes, object]] = {}
        self.entries: dict[bytes, NamespaceEntry] = {}

    def open(
        self, identity: str, group_bytes: Sequence[int], *, pool_only: bool = False, adopted: bool = False
    ) -> NamespaceEntry:
        """Opens a namespace, or finds it open.

        Args:
            pool_only: Whether its blocks are to be in the pool only.
            adopted: Whether a tier speaks of it and not a client.

        Raises:
            InvalidRequest: the identity is not one; or it is open and copied down, or not, otherwise than asked.
            SizeMismatch: it is open with other block sizes; both are named.
            LimitExceeded: too many groups or namespaces.
        """
        if len(identity) > NAMESPACE_TEXT_BYTES_MAX:
            raise LimitExceeded(
                f"a namespace text of {len(identity)} bytes; at most {NAMESPACE_TEXT_BYTES_MAX}"
                " (namespace_text_bytes_max)"
            )
        fields = parse_identity(identity)
        sizes = tuple(group_bytes)
        if not sizes or any(size < 1 for size in sizes):
            raise InvalidRequest(f"block bytes by group are {list(sizes)}: give one size of at least 1 for each group")
        if len(sizes) > GROUPS_MAX:
            raise LimitExceeded(f"{len(sizes)} KV-cache groups; at most {GROUPS_MAX} (groups_max) are supported")
        digest = digest_of_identity(identity)
        entry = self.entries.get(digest)
        if entry is not None:
            check_block_bytes(identity, entry.group_bytes, sizes)
            if entry.adopted and not adopted:
                entry.adopted, entry.pool_only = False, pool_only
            elif not adopted and entry.pool_only != pool_only:
                raise InvalidRequest(
                    f"namespace {digest.hex()} is open with copy_down={not entry.pool_only}, and this client asks for "
                    f"copy_down={not pool_only}: all clients of a namespace have to agree"
                )
            return entry
        if len(self.entries) >= NAMESPACES_MAX:
            raise LimitExceeded(
                f"{NAMESPACES_MAX} namespaces are open (namespaces_max); restart the daemon to forget them"
            )
        self._tell_apart(digest, fields)
        entry = self.entries[digest] = NamespaceEntry(digest, identity, dict(fields), sizes)
        entry.pool_only, entry.adopted = pool_only, adopted
        for tier in self._tiers if not pool_only else ():
            tier.remember(TierNamespace(digest, identity, sizes))
        return entry

    def _tell_apart(self, digest: bytes, fields: Mapping[str, Any]) -> None:
        """Says so where a new namespace differs from another one in nothing but a setting that is easily left out on
        one of two machines: their engines never find each other's blocks, and nothing else would tell why.
        """
        for name in _EASILY_LEFT_OUT:
            rest = {field: value for field, value in fields.items() if field != name}
            key = name, hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).digest()
            other, value = self._alike.setdefault(key, (digest, fields[name]))
            if other != digest:
                self._log.warning(
                    "two namespaces differ in one setting, and share no block because of it",
                    setting=name,
                    values=[value, fields[name]],
                    namespaces=[other.hex(), digest.hex()],
                )

    def adopt(self) -> None:
        """Opens the namespaces that the tiers have blocks of, so that they are shown, listed and flushed.

        A tier that is still reading its index knows them later: whoever looks at all namespaces calls this before.
        """
        for tier in self._tiers:
            for found in tier.namespaces():
                with contextlib.suppress(InvalidRequest, LimitExceeded, SizeMismatch):
                    self.open(found.identity, found.group_bytes, adopted=True)

    def keyspace(self, digest: bytes, kv_group: int) -> Keyspace:
        """The directory of one group of an open namespace.

        Raises:
            UnknownNamespace: it was never opened in this life of the daemon.
            InvalidRequest: it has no such group.
        """
        entry = self.entries.get(digest)
        if entry is None:
            self.adopt()
            entry = self.entries.get(digest)
        if entry is None:
            if len(digest) != DIGEST_BYTES:
                raise InvalidRequest(f"a namespace digest has {DIGEST_BYTES} bytes, not {len(digest)}")
            raise UnknownNamespace(f"namespace {digest.hex()} is not open here: call OpenNamespace first")
        if kv_group >= len(entry.keyspaces):
            raise InvalidRequest(f"group {kv_group} of namespace {digest.hex()}: it has {len(entry.keyspaces)} groups")
        return entry.keyspaces[kv_group]

    def keyspaces(self, digest: bytes | None) -> Iterator[Keyspace]:
        """Every group of one namespace that is open, or of all."""
        for entry in self.entries.values() if digest is None else [self.entries[digest]]:
            yield from entry.keyspaces
