from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CacheOpKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CACHE_OP_KIND_UNSPECIFIED: _ClassVar[CacheOpKind]
    CACHE_OP_KIND_SWAP_OUT: _ClassVar[CacheOpKind]
    CACHE_OP_KIND_SWAP_IN: _ClassVar[CacheOpKind]
    CACHE_OP_KIND_COPY: _ClassVar[CacheOpKind]
CACHE_OP_KIND_UNSPECIFIED: CacheOpKind
CACHE_OP_KIND_SWAP_OUT: CacheOpKind
CACHE_OP_KIND_SWAP_IN: CacheOpKind
CACHE_OP_KIND_COPY: CacheOpKind

class WorkerMessage(_message.Message):
    __slots__ = ("epoch", "register", "ready", "step_result", "heartbeat", "need_full_state", "drain_done", "failed")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    STEP_RESULT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    NEED_FULL_STATE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_DONE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    register: Register
    ready: Ready
    step_result: StepResult
    heartbeat: WorkerHeartbeat
    need_full_state: NeedFullState
    drain_done: DrainDone
    failed: Failed
    def __init__(self, epoch: _Optional[int] = ..., register: _Optional[_Union[Register, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., step_result: _Optional[_Union[StepResult, _Mapping]] = ..., heartbeat: _Optional[_Union[WorkerHeartbeat, _Mapping]] = ..., need_full_state: _Optional[_Union[NeedFullState, _Mapping]] = ..., drain_done: _Optional[_Union[DrainDone, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ...) -> None: ...

class SchedulerMessage(_message.Message):
    __slots__ = ("epoch", "welcome", "refused", "step_plan", "heartbeat", "drain", "register_again")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    STEP_PLAN_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    REGISTER_AGAIN_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    welcome: Welcome
    refused: Refused
    step_plan: StepPlan
    heartbeat: SchedulerHeartbeat
    drain: Drain
    register_again: RegisterAgain
    def __init__(self, epoch: _Optional[int] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., step_plan: _Optional[_Union[StepPlan, _Mapping]] = ..., heartbeat: _Optional[_Union[SchedulerHeartbeat, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., register_again: _Optional[_Union[RegisterAgain, _Mapping]] = ...) -> None: ...

class Register(_message.Message):
    __slots__ = ("protocol_version", "worker_id", "incarnation", "model_fingerprint", "device", "group", "rank", "world_size")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    worker_id: str
    incarnation: int
    model_fingerprint: str
    device: str
    group: str
    rank: int
    world_size: int
    def __init__(self, protocol_version: _Optional[int] = ..., worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., model_fingerprint: _Optional[str] = ..., device: _Optional[str] = ..., group: _Optional[str] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("heartbeat_interval_ms", "max_frame_bytes")
    HEARTBEAT_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_FRAME_BYTES_FIELD_NUMBER: _ClassVar[int]
    heartbeat_interval_ms: int
    max_frame_bytes: int
    def __init__(self, heartbeat_interval_ms: _Optional[int] = ..., max_frame_bytes: _Optional[int] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class RegisterAgain(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Ready(_message.Message):
    __slots__ = ("num_device_blocks", "num_host_blocks", "block_size", "max_num_batched_tokens", "max_num_seqs", "block_bytes", "copy_bytes_per_s", "prefill_tokens_per_s")
    NUM_DEVICE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    COPY_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    num_device_blocks: int
    num_host_blocks: int
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    block_bytes: int
    copy_bytes_per_s: float
    prefill_tokens_per_s: float
    def __init__(self, num_device_blocks: _Optional[int] = ..., num_host_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., block_bytes: _Optional[int] = ..., copy_bytes_per_s: _Optional[float] = ..., prefill_tokens_per_s: _Optional[float] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "typical_p", "rules", "num_logprobs")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_P_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    typical_p: float
    rules: TokenRules
    num_logprobs: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., typical_p: _Optional[float] = ..., rules: _Optional[_Union[TokenRules, _Mapping]] = ..., num_logprobs: _Optional[int] = ...) -> None: ...

class TokenRules(_message.Message):
    __slots__ = ("repetition_penalty", "presence_penalty", "frequency_penalty", "bias_token_ids", "biases", "allowed_token_ids", "banned_token_ids", "bad_words", "min_tokens", "end_token_ids")
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    BIAS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BIASES_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BANNED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    bias_token_ids: _containers.RepeatedScalarFieldContainer[int]
    biases: _containers.RepeatedScalarFieldContainer[float]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    banned_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedCompositeFieldContainer[BadWord]
    min_tokens: int
    end_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., bias_token_ids: _Optional[_Iterable[int]] = ..., biases: _Optional[_Iterable[float]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., banned_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[_Union[BadWord, _Mapping]]] = ..., min_tokens: _Optional[int] = ..., end_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class BadWord(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SequenceStart(_message.Message):
    __slots__ = ("handle", "token_ids", "num_prompt_tokens", "num_computed_tokens", "block_table", "sampling", "sequence_index", "num_candidates", "num_prompt_logprobs", "first_prompt_logprob")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TABLE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FIRST_PROMPT_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    handle: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_table: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingParams
    sequence_index: int
    num_candidates: int
    num_prompt_logprobs: int
    first_prompt_logprob: int
    def __init__(self, handle: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., block_table: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., sequence_index: _Optional[int] = ..., num_candidates: _Optional[int] = ..., num_prompt_logprobs: _Optional[int] = ..., first_prompt_logprob: _Optional[int] = ...) -> None: ...

class Fork(_message.Message):
    __slots__ = ("handle", "source_handle", "block")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_HANDLE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    handle: int
    source_handle: int
    block: int
    def __init__(self, handle: _Optional[int] = ..., source_handle: _Optional[int] = ..., block: _Optional[int] = ...) -> None: ...

class CacheOp(_message.Message):
    __slots__ = ("id", "kind", "source_blocks", "target_blocks")
    ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SOURCE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TARGET_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    id: int
    kind: CacheOpKind
    source_blocks: _containers.RepeatedScalarFieldContainer[int]
    target_blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, id: _Optional[int] = ..., kind: _Optional[_Union[CacheOpKind, str]] = ..., source_blocks: _Optional[_Iterable[int]] = ..., target_blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenMask(_message.Message):
    __slots__ = ("handle", "token_ids", "bits")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BITS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    bits: bytes
    def __init__(self, handle: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., bits: _Optional[bytes] = ...) -> None: ...

class StepPlan(_message.Message):
    __slots__ = ("step", "base_step", "reset", "finished_handles", "starts", "append_handles", "append_blocks", "cache_ops", "decode_handles", "chunk_handles", "chunk_num_tokens", "chunk_samples", "forks", "chosen_handles", "chosen_token_ids", "token_masks")
    STEP_FIELD_NUMBER: _ClassVar[int]
    BASE_STEP_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    FINISHED_HANDLES_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    APPEND_HANDLES_FIELD_NUMBER: _ClassVar[int]
    APPEND_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHE_OPS_FIELD_NUMBER: _ClassVar[int]
    DECODE_HANDLES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_HANDLES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    FORKS_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_HANDLES_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_MASKS_FIELD_NUMBER: _ClassVar[int]
    step: int
    base_step: int
    reset: bool
    finished_handles: _containers.RepeatedScalarFieldContainer[int]
    starts: _containers.RepeatedCompositeFieldContainer[SequenceStart]
    append_handles: _containers.RepeatedScalarFieldContainer[int]
    append_blocks: _containers.RepeatedScalarFieldContainer[int]
    cache_ops: _containers.RepeatedCompositeFieldContainer[CacheOp]
    decode_handles: _containers.RepeatedScalarFieldContainer[int]
    chunk_handles: _containers.RepeatedScalarFieldContainer[int]
    chunk_num_tokens: _containers.RepeatedScalarFieldContainer[int]
    chunk_samples: _containers.RepeatedScalarFieldContainer[bool]
    forks: _containers.RepeatedCompositeFieldContainer[Fork]
    chosen_handles: _containers.RepeatedScalarFieldContainer[int]
    chosen_token_ids: _containers.RepeatedScalarFieldContainer[int]
    token_masks: _containers.RepeatedCompositeFieldContainer[TokenMask]
    def __init__(self, step: _Optional[int] = ..., base_step: _Optional[int] = ..., reset: _Optional[bool] = ..., finished_handles: _Optional[_Iterable[int]] = ..., starts: _Optional[_Iterable[_Union[SequenceStart, _Mapping]]] = ..., append_handles: _Optional[_Iterable[int]] = ..., append_blocks: _Optional[_Iterable[int]] = ..., cache_ops: _Optional[_Iterable[_Union[CacheOp, _Mapping]]] = ..., decode_handles: _Optional[_Iterable[int]] = ..., chunk_handles: _Optional[_Iterable[int]] = ..., chunk_num_tokens: _Optional[_Iterable[int]] = ..., chunk_samples: _Optional[_Iterable[bool]] = ..., forks: _Optional[_Iterable[_Union[Fork, _Mapping]]] = ..., chosen_handles: _Optional[_Iterable[int]] = ..., chosen_token_ids: _Optional[_Iterable[int]] = ..., token_masks: _Optional[_Iterable[_Union[TokenMask, _Mapping]]] = ...) -> None: ...

class Candidates(_message.Message):
    __slots__ = ("handle", "token_ids", "log_probs")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    log_probs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, handle: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., log_probs: _Optional[_Iterable[float]] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("step", "handles", "token_ids", "failures", "execute_s", "candidates", "logprobs", "prompt_logprobs")
    STEP_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    EXECUTE_S_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    step: int
    handles: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    failures: _containers.RepeatedCompositeFieldContainer[SequenceFailure]
    execute_s: float
    candidates: _containers.RepeatedCompositeFieldContainer[Candidates]
    logprobs: LogprobRows
    prompt_logprobs: LogprobRows
    def __init__(self, step: _Optional[int] = ..., handles: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., failures: _Optional[_Iterable[_Union[SequenceFailure, _Mapping]]] = ..., execute_s: _Optional[float] = ..., candidates: _Optional[_Iterable[_Union[Candidates, _Mapping]]] = ..., logprobs: _Optional[_Union[LogprobRows, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[LogprobRows, _Mapping]] = ...) -> None: ...

class LogprobRows(_message.Message):
    __slots__ = ("handles", "num_places", "num_tops", "log_probs", "ranks", "top_token_ids", "top_log_probs")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    NUM_PLACES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOPS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedScalarFieldContainer[int]
    num_places: _containers.RepeatedScalarFieldContainer[int]
    num_tops: _containers.RepeatedScalarFieldContainer[int]
    log_probs: _containers.RepeatedScalarFieldContainer[float]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_log_probs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, handles: _Optional[_Iterable[int]] = ..., num_places: _Optional[_Iterable[int]] = ..., num_tops: _Optional[_Iterable[int]] = ..., log_probs: _Optional[_Iterable[float]] = ..., ranks: _Optional[_Iterable[int]] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_log_probs: _Optional[_Iterable[float]] = ...) -> None: ...

class SequenceFailure(_message.Message):
    __slots__ = ("handle", "message")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    message: str
    def __init__(self, handle: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class NeedFullState(_message.Message):
    __slots__ = ("at_step", "got_base_step")
    AT_STEP_FIELD_NUMBER: _ClassVar[int]
    GOT_BASE_STEP_FIELD_NUMBER: _ClassVar[int]
    at_step: int
    got_base_step: int
    def __init__(self, at_step: _Optional[int] = ..., got_base_step: _Optional[int] = ...) -> None: ...

class WorkerHeartbeat(_message.Message):
    __slots__ = ("step_started", "step_finished", "load_fraction")
    STEP_STARTED_FIELD_NUMBER: _ClassVar[int]
    STEP_FINISHED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FRACTION_FIELD_NUMBER: _ClassVar[int]
    step_started: int
    step_finished: int
    load_fraction: float
    def __init__(self, step_started: _Optional[int] = ..., step_finished: _Optional[int] = ..., load_fraction: _Optional[float] = ...) -> None: ...

class SchedulerHeartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Drain(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainDone(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Failed(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...
