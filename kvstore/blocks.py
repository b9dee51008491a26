"""The nouns of the product, as frozen values, and their encodings.

Glossary
    block        The KV of ``block_size`` tokens of one KV-cache group, all ranks of one engine side by side.
    block hash   The engine's chained hash of the last token block in it. Opaque bytes here.
    namespace    Everything that must be equal for bytes to be interchangeable; named by one digest.
    group        Index of a KV-cache group. Blocks of different groups may differ in size.
    key          Namespace digest + group + block hash. Within one call only the hash is spelled out.
    tier         A place where blocks rest: cpu, disk, redis.
    slot         The room of one block in the pool.
    lease        Pins on readable blocks.
    reservation  Empty slots that a session may fill.
    session      One attached process.
    generation   One life of the daemon's pool.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from kvstore.errors import InvalidRequest, SizeMismatch

#: Longest key in bytes. vLLM's keys are 32 (sha256); room for a hash of 512 bits with a suffix.
KEY_BYTES_MAX: Final = 128
#: Largest block. A slot has to fit a segment, offsets are 64 bits; a petabyte typed by mistake should not get far.
BLOCK_BYTES_MAX: Final = 1 << 40
DIGEST_BYTES: Final = 16
SESSION_ID_BYTES: Final = 16
#: Of a generation, what tells the life of the pool; the rest tells that of the session's group.
POOL_LIFE_BYTES: Final = 8
#: Fields of a Namespace that its digest does not cover.
_NO_IDENTITY: Final = frozenset({"block_bytes", "more_group_bytes", "copy_down"})


@dataclasses.dataclass(frozen=True, slots=True)
class Namespace:
    """Everything that must be equal for the bytes of two blocks to be interchangeable.

    Two namespaces with equal identity have equal digests. Sizes are deliberately not part of the identity: if two
    clients agree on everything else and differ in the size of a block, then something that belongs in the identity was
    left out, and the daemon refuses the second one and names both sizes instead of keeping two silent halves.

    Attributes:
        model: Name or path of the model as the engine knows it.
        dtype: Settled dtype of the KV cache, such as ``bfloat16``; never ``auto``.
        block_size: Tokens per block. None: the daemon's default (``--block-size``), settled when a client connects.
        block_bytes: Bytes of one block of group 0.
        more_group_bytes: Bytes of one block of groups 1, 2, …
        revision: Revision, or a fingerprint of the weights.
        tokens_per_hash: Tokens that one block hash of the engine covers; 0 where it is the block size.
        layers: Names of the layers of each group, in order.
        layout: Order of the axes in a page, such as ``LBHNC``, and the id of the canonical format if one is used.
        parallel: Parallel shape such as ``tp=2,pp=1``, or ``agnostic``.
        hash_algo: Name of the engine's block-hash function.
        hash_seed: Root seed of the hash chain.
        lora: LoRA identity, where the engine's hash does not carry it.
        salt: Cache salt, where the engine's hash does not carry it.
        tenant: Who the blocks belong to.
        extra: Anything else that tells bytes apart, as pairs.
        copy_down: Whether blocks are copied to the tiers below the pool, and come up from there. Not part of the
            identity: all clients of a namespace have to agree.
    """

    model: str
    dtype: str
    block_size: int | None = None
    block_bytes: int = 0
    more_group_bytes: tuple[int, ...] = ()
    revision: str = ""
    tokens_per_hash: int = 0
    layers: tuple[tuple[str, ...], ...] = ()
    layout: str = ""
    parallel: str = ""
    hash_algo: str = ""
    hash_seed: str = ""
    lora: str = ""
    salt: str = ""
    tenant: str = ""
    extra: tuple[tuple[str, str], ...] = ()
    copy_down: bool = True

    def __post_init__(self) -> None:
        if not self.model:
            raise InvalidRequest("Namespace.model is empty: name the model whose KV is stored")
        if not self.dtype or self.dtype == "auto":
            raise InvalidRequest(
                f"Namespace.dtype is {self.dtype!r}: give the dtype that the engine settled on, such as 'bfloat16'"
            )
        if self.block_size is not None and self.block_size < 1:
            raise InvalidRequest(f"Namespace.block_size is {self.block_size}: it counts tokens and must be at least 1")
        for group, size in enumerate(self.group_bytes):
            if not 1 <= size <= BLOCK_BYTES_MAX:
                raise InvalidRequest(
                    f"block_bytes of group {group} is {size}: it must be between 1 and {BLOCK_BYTES_MAX}"
                )

    @property
    def group_bytes(self) -> tuple[int, ...]:
        """Bytes of one block, by group."""
        return (self.block_bytes, *self.more_group_bytes)

    def settled(self, default_block_size: int) -> Namespace:
        """This namespace with the daemon's default filled in where ``block_size`` is None."""
        return self if self.block_size is not None else dataclasses.replace(self, block_size=default_block_size)

    def identity(self) -> str:
        """Canonical JSON of what the digest covers: sorted keys, no spaces, ASCII. Shown by ``kvstore stats``."""
        if self.block_size is None:
            raise InvalidRequest("Namespace.block_size is not settled")
        fields = dataclasses.asdict(self)
        for name in _NO_IDENTITY:
            del fields[name]
        return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    def digest(self) -> bytes:
        """Name of this namespace in every tier: 16 bytes."""
        return digest_of_identity(self.identity())


def digest_of_identity(identity: str) -> bytes:
    """Digest of a canonical identity: the first 16 bytes of its SHA-256."""
    return hashlib.sha256(identity.encode("ascii")).digest()[:DIGEST_BYTES]


def parse_identity(identity: str) -> Mapping[str, Any]:
    """Reads an identity back.

    Raises:
        InvalidRequest: it is not the canonical JSON of an identity (the digest of any other spelling would differ).
    """
    try:
        fields = json.loads(identity)
        known = {field.name for field in dataclasses.fields(Namespace)} - _NO_IDENTITY
        canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"namespace text is not JSON: {error}") from error
    if not isinstance(fields, dict) or canonical != identity:
        raise InvalidRequest("namespace text is not canonical JSON (sorted keys, no spaces, ASCII)")
    if set(fields) != known:
        missing, unknown = sorted(known - set(fields)), sorted(set(fields) - known)
        raise InvalidRequest(f"namespace text has other fields than a Namespace: missing {missing}, unknown {unknown}")
    return fields


def check_block_bytes(identity: str, have: tuple[int, ...], asked: tuple[int, ...]) -> None:
    """Two clients of one namespace must agree on the size of a block.

    Raises:
        SizeMismatch: they do not; both sizes are named.
    """
    if have != asked:
        raise SizeMismatch(
            f"namespace {digest_of_identity(identity).hex()} has blocks of {list(have)} bytes (by group) and this "
            f"client asks for {list(asked)}: something that changes the size is missing from the Namespace"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class BlockLocation:
    """Where a block lies in the mapping.

    Attributes:
        offset: Bytes from the start of the mapping; names the slot.
        size_bytes: Bytes of the block (the slot may be a little larger).
        epoch: Value of the slot's epoch when it was handed out. A reader compares it after its copy.
    """

    offset: int
    size_bytes: int
    epoch: int
