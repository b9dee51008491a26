from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PingRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PingReply(_message.Message):
    __slots__ = ("generation", "version", "pid", "uptime_s")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    generation: bytes
    version: str
    pid: int
    uptime_s: float
    def __init__(self, generation: _Optional[bytes] = ..., version: _Optional[str] = ..., pid: _Optional[int] = ..., uptime_s: _Optional[float] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsReply(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("namespace", "limit")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    limit: int
    def __init__(self, namespace: _Optional[bytes] = ..., limit: _Optional[int] = ...) -> None: ...

class ListedBlock(_message.Message):
    __slots__ = ("namespace", "group", "key", "size_bytes", "pins", "tiers")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    group: int
    key: bytes
    size_bytes: int
    pins: int
    tiers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, namespace: _Optional[bytes] = ..., group: _Optional[int] = ..., key: _Optional[bytes] = ..., size_bytes: _Optional[int] = ..., pins: _Optional[int] = ..., tiers: _Optional[_Iterable[str]] = ...) -> None: ...

class ListReply(_message.Message):
    __slots__ = ("blocks", "total")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[ListedBlock]
    total: int
    def __init__(self, blocks: _Optional[_Iterable[_Union[ListedBlock, _Mapping]]] = ..., total: _Optional[int] = ...) -> None: ...

class FlushRequest(_message.Message):
    __slots__ = ("namespace", "from_peer")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    FROM_PEER_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    from_peer: bool
    def __init__(self, namespace: _Optional[bytes] = ..., from_peer: _Optional[bool] = ...) -> None: ...

class FlushReply(_message.Message):
    __slots__ = ("removed",)
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    removed: int
    def __init__(self, removed: _Optional[int] = ...) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("namespace", "max_bytes")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    max_bytes: int
    def __init__(self, namespace: _Optional[bytes] = ..., max_bytes: _Optional[int] = ...) -> None: ...

class PrefetchEvent(_message.Message):
    __slots__ = ("blocks", "bytes", "done")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    bytes: int
    done: bool
    def __init__(self, blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., done: _Optional[bool] = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("free_bytes",)
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    free_bytes: int
    def __init__(self, free_bytes: _Optional[int] = ...) -> None: ...

class EvictReply(_message.Message):
    __slots__ = ("evicted_blocks", "free_bytes")
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    evicted_blocks: int
    free_bytes: int
    def __init__(self, evicted_blocks: _Optional[int] = ..., free_bytes: _Optional[int] = ...) -> None: ...
