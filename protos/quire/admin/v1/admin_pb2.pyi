from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_LOADING: _ClassVar[WorkerState]
    WORKER_STATE_READY: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_LOADING: WorkerState
WORKER_STATE_READY: WorkerState
WORKER_STATE_DRAINING: WorkerState

class GetEngineStateRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetEngineStateResponse(_message.Message):
    __slots__ = ("num_waiting", "num_running", "num_swapped", "replicas", "admission_paused", "counters", "num_streams", "num_detachable", "num_tasks", "num_threads")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAPPED_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_PAUSED_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    NUM_STREAMS_FIELD_NUMBER: _ClassVar[int]
    NUM_DETACHABLE_FIELD_NUMBER: _ClassVar[int]
    NUM_TASKS_FIELD_NUMBER: _ClassVar[int]
    NUM_THREADS_FIELD_NUMBER: _ClassVar[int]
    num_waiting: int
    num_running: int
    num_swapped: int
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaState]
    admission_paused: bool
    counters: _containers.ScalarMap[str, int]
    num_streams: int
    num_detachable: int
    num_tasks: int
    num_threads: int
    def __init__(self, num_waiting: _Optional[int] = ..., num_running: _Optional[int] = ..., num_swapped: _Optional[int] = ..., replicas: _Optional[_Iterable[_Union[ReplicaState, _Mapping]]] = ..., admission_paused: _Optional[bool] = ..., counters: _Optional[_Mapping[str, int]] = ..., num_streams: _Optional[int] = ..., num_detachable: _Optional[int] = ..., num_tasks: _Optional[int] = ..., num_threads: _Optional[int] = ...) -> None: ...

class ReplicaState(_message.Message):
    __slots__ = ("worker_id", "num_blocks", "num_free_blocks", "num_cached_blocks", "num_running", "num_steps_in_flight", "num_steps", "schedule_s", "execute_s")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_S_FIELD_NUMBER: _ClassVar[int]
    EXECUTE_S_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_running: int
    num_steps_in_flight: int
    num_steps: int
    schedule_s: float
    execute_s: float
    def __init__(self, worker_id: _Optional[str] = ..., num_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., num_running: _Optional[int] = ..., num_steps_in_flight: _Optional[int] = ..., num_steps: _Optional[int] = ..., schedule_s: _Optional[float] = ..., execute_s: _Optional[float] = ...) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    def __init__(self, workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ...) -> None: ...

class Worker(_message.Message):
    __slots__ = ("worker_id", "state", "device", "load_fraction", "epoch")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FRACTION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    state: WorkerState
    device: str
    load_fraction: float
    epoch: int
    def __init__(self, worker_id: _Optional[str] = ..., state: _Optional[_Union[WorkerState, str]] = ..., device: _Optional[str] = ..., load_fraction: _Optional[float] = ..., epoch: _Optional[int] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[LiveRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[LiveRequest, _Mapping]]] = ...) -> None: ...

class LiveRequest(_message.Message):
    __slots__ = ("request_id", "state", "num_prompt_tokens", "num_output_tokens", "num_preemptions")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    state: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_preemptions: int
    def __init__(self, request_id: _Optional[str] = ..., state: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., num_preemptions: _Optional[int] = ...) -> None: ...

class ExplainRequestRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExplainRequestResponse(_message.Message):
    __slots__ = ("is_live", "num_dropped_events", "events")
    IS_LIVE_FIELD_NUMBER: _ClassVar[int]
    NUM_DROPPED_EVENTS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    is_live: bool
    num_dropped_events: int
    events: _containers.RepeatedCompositeFieldContainer[StoryEvent]
    def __init__(self, is_live: _Optional[bool] = ..., num_dropped_events: _Optional[int] = ..., events: _Optional[_Iterable[_Union[StoryEvent, _Mapping]]] = ...) -> None: ...

class StoryEvent(_message.Message):
    __slots__ = ("after_s", "sequence_index", "text")
    AFTER_S_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    after_s: float
    sequence_index: int
    text: str
    def __init__(self, after_s: _Optional[float] = ..., sequence_index: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class CancelRequestRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class CancelRequestResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PauseAdmissionRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PauseAdmissionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeAdmissionRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeAdmissionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushPrefixCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushPrefixCacheResponse(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...
