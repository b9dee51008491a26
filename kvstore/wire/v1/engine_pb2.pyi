from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WatchFor(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WATCH_FOR_ANYTHING: _ClassVar[WatchFor]
    WATCH_FOR_COMING: _ClassVar[WatchFor]
    WATCH_FOR_GOING: _ClassVar[WatchFor]

class Shortfall(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SHORTFALL_NONE: _ClassVar[Shortfall]
    SHORTFALL_PINNED: _ClassVar[Shortfall]
    SHORTFALL_SHARE: _ClassVar[Shortfall]
    SHORTFALL_POPULATING: _ClassVar[Shortfall]
    SHORTFALL_TOO_LARGE: _ClassVar[Shortfall]
    SHORTFALL_DRAINING: _ClassVar[Shortfall]
    SHORTFALL_COPYING: _ClassVar[Shortfall]

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_STORED: _ClassVar[Outcome]
    OUTCOME_EXISTS: _ClassVar[Outcome]
    OUTCOME_NOT_RESERVED: _ClassVar[Outcome]
WATCH_FOR_ANYTHING: WatchFor
WATCH_FOR_COMING: WatchFor
WATCH_FOR_GOING: WatchFor
SHORTFALL_NONE: Shortfall
SHORTFALL_PINNED: Shortfall
SHORTFALL_SHARE: Shortfall
SHORTFALL_POPULATING: Shortfall
SHORTFALL_TOO_LARGE: Shortfall
SHORTFALL_DRAINING: Shortfall
SHORTFALL_COPYING: Shortfall
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_STORED: Outcome
OUTCOME_EXISTS: Outcome
OUTCOME_NOT_RESERVED: Outcome

class AttachRequest(_message.Message):
    __slots__ = ("client_name", "pid", "group", "share_bytes")
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SHARE_BYTES_FIELD_NUMBER: _ClassVar[int]
    client_name: str
    pid: int
    group: str
    share_bytes: int
    def __init__(self, client_name: _Optional[str] = ..., pid: _Optional[int] = ..., group: _Optional[str] = ..., share_bytes: _Optional[int] = ...) -> None: ...

class AttachEvent(_message.Message):
    __slots__ = ("welcome", "population", "draining")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    POPULATION_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    population: Population
    draining: Draining
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., population: _Optional[_Union[Population, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("session", "generation", "pool_bytes", "handoff_path", "block_size", "keys_max", "populated_bytes", "data_address", "data_secret", "gds")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_PATH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    KEYS_MAX_FIELD_NUMBER: _ClassVar[int]
    POPULATED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DATA_SECRET_FIELD_NUMBER: _ClassVar[int]
    GDS_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    generation: bytes
    pool_bytes: int
    handoff_path: str
    block_size: int
    keys_max: int
    populated_bytes: int
    data_address: str
    data_secret: bytes
    gds: str
    def __init__(self, session: _Optional[bytes] = ..., generation: _Optional[bytes] = ..., pool_bytes: _Optional[int] = ..., handoff_path: _Optional[str] = ..., block_size: _Optional[int] = ..., keys_max: _Optional[int] = ..., populated_bytes: _Optional[int] = ..., data_address: _Optional[str] = ..., data_secret: _Optional[bytes] = ..., gds: _Optional[str] = ...) -> None: ...

class Population(_message.Message):
    __slots__ = ("populated_bytes",)
    POPULATED_BYTES_FIELD_NUMBER: _ClassVar[int]
    populated_bytes: int
    def __init__(self, populated_bytes: _Optional[int] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class OpenNamespaceRequest(_message.Message):
    __slots__ = ("session", "text", "group_bytes", "pool_only")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    GROUP_BYTES_FIELD_NUMBER: _ClassVar[int]
    POOL_ONLY_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    text: str
    group_bytes: _containers.RepeatedScalarFieldContainer[int]
    pool_only: bool
    def __init__(self, session: _Optional[bytes] = ..., text: _Optional[str] = ..., group_bytes: _Optional[_Iterable[int]] = ..., pool_only: _Optional[bool] = ...) -> None: ...

class OpenNamespaceReply(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    def __init__(self, digest: _Optional[bytes] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("session", "namespace", "group", "keys")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    namespace: bytes
    group: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, session: _Optional[bytes] = ..., namespace: _Optional[bytes] = ..., group: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class LookupReply(_message.Message):
    __slots__ = ("available",)
    AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    available: int
    def __init__(self, available: _Optional[int] = ...) -> None: ...

class StatRequest(_message.Message):
    __slots__ = ("session", "namespace", "group", "keys")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    namespace: bytes
    group: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, session: _Optional[bytes] = ..., namespace: _Optional[bytes] = ..., group: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class StatReply(_message.Message):
    __slots__ = ("present", "block_bytes")
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    present: bytes
    block_bytes: int
    def __init__(self, present: _Optional[bytes] = ..., block_bytes: _Optional[int] = ...) -> None: ...

class Query(_message.Message):
    __slots__ = ("group", "keys", "extents_min")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_MIN_FIELD_NUMBER: _ClassVar[int]
    group: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    extents_min: int
    def __init__(self, group: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ..., extents_min: _Optional[int] = ...) -> None: ...

class AcquireRequest(_message.Message):
    __slots__ = ("session", "namespace", "queries", "request_id", "from_peer", "token_s")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FROM_PEER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    namespace: bytes
    queries: _containers.RepeatedCompositeFieldContainer[Query]
    request_id: int
    from_peer: bool
    token_s: float
    def __init__(self, session: _Optional[bytes] = ..., namespace: _Optional[bytes] = ..., queries: _Optional[_Iterable[_Union[Query, _Mapping]]] = ..., request_id: _Optional[int] = ..., from_peer: _Optional[bool] = ..., token_s: _Optional[float] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("lease", "ready", "pending", "offsets", "epochs", "pending_from", "extents_lease", "extents", "below_s")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    PENDING_FROM_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_LEASE_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    BELOW_S_FIELD_NUMBER: _ClassVar[int]
    lease: int
    ready: int
    pending: int
    offsets: bytes
    epochs: bytes
    pending_from: str
    extents_lease: int
    extents: _containers.RepeatedCompositeFieldContainer[Extent]
    below_s: float
    def __init__(self, lease: _Optional[int] = ..., ready: _Optional[int] = ..., pending: _Optional[int] = ..., offsets: _Optional[bytes] = ..., epochs: _Optional[bytes] = ..., pending_from: _Optional[str] = ..., extents_lease: _Optional[int] = ..., extents: _Optional[_Iterable[_Union[Extent, _Mapping]]] = ..., below_s: _Optional[float] = ...) -> None: ...

class AcquireReply(_message.Message):
    __slots__ = ("generation", "grants", "paths", "token_s")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    PATHS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    generation: bytes
    grants: _containers.RepeatedCompositeFieldContainer[Grant]
    paths: _containers.RepeatedScalarFieldContainer[str]
    token_s: float
    def __init__(self, generation: _Optional[bytes] = ..., grants: _Optional[_Iterable[_Union[Grant, _Mapping]]] = ..., paths: _Optional[_Iterable[str]] = ..., token_s: _Optional[float] = ...) -> None: ...

class SelectRequest(_message.Message):
    __slots__ = ("session", "namespace", "query", "drop", "wait_ms", "request_id")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    namespace: bytes
    query: Query
    drop: bool
    wait_ms: int
    request_id: int
    def __init__(self, session: _Optional[bytes] = ..., namespace: _Optional[bytes] = ..., query: _Optional[_Union[Query, _Mapping]] = ..., drop: _Optional[bool] = ..., wait_ms: _Optional[int] = ..., request_id: _Optional[int] = ...) -> None: ...

class SelectReply(_message.Message):
    __slots__ = ("generation", "grant")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    generation: bytes
    grant: Grant
    def __init__(self, generation: _Optional[bytes] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("session", "leases", "remove", "hold", "forget")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    REMOVE_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    leases: _containers.RepeatedScalarFieldContainer[int]
    remove: bool
    hold: bool
    forget: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session: _Optional[bytes] = ..., leases: _Optional[_Iterable[int]] = ..., remove: _Optional[bool] = ..., hold: _Optional[bool] = ..., forget: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ("released", "removed")
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    released: int
    removed: int
    def __init__(self, released: _Optional[int] = ..., removed: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("session", "namespace", "group", "seen", "wait_ms", "follow", "wanted", "kinds")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    namespace: bytes
    group: int
    seen: int
    wait_ms: int
    follow: bool
    wanted: WatchFor
    kinds: bytes
    def __init__(self, session: _Optional[bytes] = ..., namespace: _Optional[bytes] = ..., group: _Optional[int] = ..., seen: _Optional[int] = ..., wait_ms: _Optional[int] = ..., follow: _Optional[bool] = ..., wanted: _Optional[_Union[WatchFor, str]] = ..., kinds: _Optional[bytes] = ...) -> None: ...

class WatchReply(_message.Message):
    __slots__ = ("changes", "keys", "claimed", "whole", "gone", "offsets", "epochs")
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    changes: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    claimed: bytes
    whole: bool
    gone: _containers.RepeatedScalarFieldContainer[bytes]
    offsets: bytes
    epochs: bytes
    def __init__(self, changes: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ..., claimed: _Optional[bytes] = ..., whole: _Optional[bool] = ..., gone: _Optional[_Iterable[bytes]] = ..., offsets: _Optional[bytes] = ..., epochs: _Optional[bytes] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("session", "namespace", "group", "count", "wait_ms", "keys", "request_id")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    namespace: bytes
    group: int
    count: int
    wait_ms: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    request_id: int
    def __init__(self, session: _Optional[bytes] = ..., namespace: _Optional[bytes] = ..., group: _Optional[int] = ..., count: _Optional[int] = ..., wait_ms: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ..., request_id: _Optional[int] = ...) -> None: ...

class ReserveReply(_message.Message):
    __slots__ = ("generation", "offsets", "epochs", "shortfall", "exists")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    SHORTFALL_FIELD_NUMBER: _ClassVar[int]
    EXISTS_FIELD_NUMBER: _ClassVar[int]
    generation: bytes
    offsets: bytes
    epochs: bytes
    shortfall: Shortfall
    exists: bytes
    def __init__(self, generation: _Optional[bytes] = ..., offsets: _Optional[bytes] = ..., epochs: _Optional[bytes] = ..., shortfall: _Optional[_Union[Shortfall, str]] = ..., exists: _Optional[bytes] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("session", "namespace", "group", "offsets", "keys", "epochs", "parent", "keep")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    namespace: bytes
    group: int
    offsets: bytes
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    epochs: bytes
    parent: bytes
    keep: bool
    def __init__(self, session: _Optional[bytes] = ..., namespace: _Optional[bytes] = ..., group: _Optional[int] = ..., offsets: _Optional[bytes] = ..., keys: _Optional[_Iterable[bytes]] = ..., epochs: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., keep: _Optional[bool] = ...) -> None: ...

class CommitReply(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: bytes
    def __init__(self, outcomes: _Optional[bytes] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("session", "offsets", "epochs")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    offsets: bytes
    epochs: bytes
    def __init__(self, session: _Optional[bytes] = ..., offsets: _Optional[bytes] = ..., epochs: _Optional[bytes] = ...) -> None: ...

class AbortReply(_message.Message):
    __slots__ = ("returned",)
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    returned: int
    def __init__(self, returned: _Optional[int] = ...) -> None: ...

class DeleteRequest(_message.Message):
    __slots__ = ("session", "namespace", "group", "keys", "from_peer")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    FROM_PEER_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    namespace: bytes
    group: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    from_peer: bool
    def __init__(self, session: _Optional[bytes] = ..., namespace: _Optional[bytes] = ..., group: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ..., from_peer: _Optional[bool] = ...) -> None: ...

class DeleteReply(_message.Message):
    __slots__ = ("removed",)
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    removed: int
    def __init__(self, removed: _Optional[int] = ...) -> None: ...

class LeaseExtentsRequest(_message.Message):
    __slots__ = ("session", "namespace", "group", "keys", "request_id")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    namespace: bytes
    group: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    request_id: int
    def __init__(self, session: _Optional[bytes] = ..., namespace: _Optional[bytes] = ..., group: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ..., request_id: _Optional[int] = ...) -> None: ...

class Extent(_message.Message):
    __slots__ = ("key", "path", "offset", "size_bytes", "check")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    key: int
    path: int
    offset: int
    size_bytes: int
    check: int
    def __init__(self, key: _Optional[int] = ..., path: _Optional[int] = ..., offset: _Optional[int] = ..., size_bytes: _Optional[int] = ..., check: _Optional[int] = ...) -> None: ...

class LeaseExtentsReply(_message.Message):
    __slots__ = ("generation", "lease", "paths", "extents")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    PATHS_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    generation: bytes
    lease: int
    paths: _containers.RepeatedScalarFieldContainer[str]
    extents: _containers.RepeatedCompositeFieldContainer[Extent]
    def __init__(self, generation: _Optional[bytes] = ..., lease: _Optional[int] = ..., paths: _Optional[_Iterable[str]] = ..., extents: _Optional[_Iterable[_Union[Extent, _Mapping]]] = ...) -> None: ...
