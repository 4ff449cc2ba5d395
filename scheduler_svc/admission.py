"""Admission: checks a GenerateRequest against every limit and makes the core's request of it."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from protos.quire.inference.v1 import inference_pb2
from scheduler_svc.core.constraint import TokenConstraint
from scheduler_svc.core.messages import DEFAULT_TENANT, NewRequest
from scheduler_svc.tenancy import Tenancy
from shared.errors import InvalidArgument, NotFound
from shared.ids import RequestId
from shared.model_spec import ModelSpec
from shared.sampling import BeamParams, EarlyStopping, SamplingParams

DEFAULT_DETACH_TTL_S = 60
GREEDY = SamplingParams(temperature=0.0)
"""What a beam search has in place of sampling parameters: it draws nothing."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may ask for; docs/API.md lists them with the sentences here."""

    max_request_id_bytes: int = 128
    """Bytes of `request_id`."""
    max_cache_salt_bytes: int = 128
    """Bytes of `cache_salt`."""
    max_text_bytes: int = 4 << 20
    """Bytes of a text, or of all messages of a conversation."""
    max_token_ids: int = 1 << 20
    """Ids to detokenize in one call."""
    max_chat_messages: int = 4096
    """Messages of a conversation."""
    max_stop_strings: int = 16
    """Stop strings."""
    max_stop_string_bytes: int = 256
    """Bytes of a stop string."""
    max_stop_token_ids: int = 64
    """Stop token ids."""
    max_temperature: float = 100.0
    """Temperature."""
    max_choices: int = 16
    """Choices, `sampling.n`."""
    max_first_choice: int = 1 << 20
    """Number of the first choice."""
    max_beam_width: int = 16
    """Beams."""
    max_length_penalty: float = 4.0
    """Length penalties lie in [-max_length_penalty, max_length_penalty]."""
    max_constraint_bytes: int = 64 << 10
    """Bytes of a constraint: schema, pattern or grammar, or all options of a choice."""
    max_choice_options: int = 1000
    """Options of `choice`."""
    max_priority: int = 100
    """Priorities lie in [-max_priority, max_priority]."""
    max_detach_ttl_s: int = 3600
    """Seconds for which a detached request can be attached to."""


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A request that broke no limit, with every default resolved."""

    request: NewRequest
    client_id: str
    """What the client calls it."""
    stop_strings: tuple[str, ...]
    is_bounded_by_context: bool
    """The context ends the request before the client's max_tokens would."""
    detach_ttl_s: float | None = None
    """How long it can be attached to while no call streams it; None: it ends with its call."""


class Admission:
    """The checks for one served model; all errors name the field by its proto path."""

    def __init__(
        self,
        spec: ModelSpec,
        limits: Limits | None = None,
        tenancy: Tenancy | None = None,
    ) -> None:
        self._spec = spec
        self._limits = limits or Limits()
        self._tenancy = tenancy or Tenancy()

    def check_model(self, name: str) -> None:
        """Raises NotFound unless `name` is the served model; empty means the only one."""
        if name and name != self._spec.name:
            raise NotFound(f"there is no model {name!r}; this server has {self._spec.name!r}")

    def check_token_ids(self, field: str, token_ids: Sequence[int]) -> None:
        """Raises InvalidArgument for the first id that is not in the vocabulary."""
        if max(token_ids, default=0) < self._spec.vocab_size:
            return
        for index, token_id in enumerate(token_ids):
            if token_id >= self._spec.vocab_size:
                size = self._spec.vocab_size
                raise InvalidArgument(f"{field}[{index}]", f"{token_id} is not in [0, {size})")

    def check(self, message: inference_pb2.GenerateRequest) -> None:
        """Checks everything but the prompt's tokens; raises InvalidArgument or NotFound."""
        limits = self._limits
        self.check_model(message.model)
        _check_bytes("request_id", message.request_id, limits.max_request_id_bytes)
        _check_bytes("cache_salt", message.cache_salt, limits.max_cache_salt_bytes)
        if not -limits.max_priority <= message.priority <= limits.max_priority:
            bound = limits.max_priority
            raise InvalidArgument("priority", f"{message.priority} is not in [-{bound}, {bound}]")
        self._check_detach(message)
        self._check_prompt(message)
        self._check_sampling(_resolved_sampling(message.sampling))
        self._check_choices(message.sampling)
        self._check_stopping(message.stopping)
        if message.HasField("beam"):
            self._check_beam(message)
        if message.WhichOneof("constraint") is not None:
            self._check_constraint(message)

    def eos_token_ids(self, message: inference_pb2.GenerateRequest) -> frozenset[int]:
        """Tokens that end a text of the model, unless the client ignores them."""
        return frozenset(() if message.stopping.ignore_eos else self._spec.eos_token_ids)

    def check_attach(
        self, message: inference_pb2.AttachRequest, tenant: str
    ) -> tuple[RequestId, inference_pb2.DisconnectPolicy]:
        """Which request a tenant's call takes up, and what is to become of it when the call ends;
        raises InvalidArgument."""
        _check_bytes("request_id", message.request_id, self._limits.max_request_id_bytes)
        _check_policy(message.disconnect)
        policy = message.disconnect or inference_pb2.DISCONNECT_POLICY_DETACH
        return self._tenancy.request_id(tenant, message.request_id), policy

    def admit(
        self,
        message: inference_pb2.GenerateRequest,
        prompt_token_ids: Sequence[int],
        *,
        constraint: TokenConstraint | None = None,
        tenant: str = DEFAULT_TENANT,
        deadline_s: float | None = None,
    ) -> AdmittedRequest:
        """The request of a checked message; `prompt_token_ids` is its prompt, tokenized, and
        `constraint` its constraint, compiled. Its caller is `tenant`, and stops waiting in
        `deadline_s` seconds.

        Raises InvalidArgument when the prompt is empty or leaves no room in the context.
        """
        field = message.WhichOneof("prompt") or "prompt"
        num_prompt_tokens = len(prompt_token_ids)
        self._check_length(field, num_prompt_tokens)
        stopping = message.stopping
        room = self._spec.context_length - num_prompt_tokens
        asked = stopping.max_tokens if stopping.HasField("max_tokens") else None
        max_tokens = room if asked is None else min(asked, room)
        beam = _resolved_beam(message.beam) if message.HasField("beam") else None
        is_detachable = message.disconnect == inference_pb2.DISCONNECT_POLICY_DETACH
        client_id = message.request_id or secrets.token_hex(16)
        request = NewRequest(
            request_id=self._tenancy.request_id(tenant, client_id),
            prompt_token_ids=tuple(prompt_token_ids),
            sampling=_resolved_sampling(message.sampling) if beam is None else GREEDY,
            max_tokens=max_tokens,
            eos_token_ids=self.eos_token_ids(message),
            stop_token_ids=frozenset(stopping.stop_token_ids),
            num_sequences=(message.sampling.n or 1) if beam is None else beam.num_return,
            first_choice=message.sampling.first_choice,
            beam=beam,
            constraint=constraint,
            priority=message.priority,
            queue_timeout_s=message.queue_timeout_ms / 1000 or None,
            # The deadline of a call is that of its request, unless the request outlives the call.
            deadline_s=None if is_detachable else deadline_s,
            tenant=tenant,
            cache_salt=self._tenancy.cache_salt(tenant, message.cache_salt),
            bypass_prefix_cache=message.bypass_prefix_cache,
        )
        return AdmittedRequest(
            request=request,
            client_id=client_id,
            stop_strings=tuple(stopping.stop_strings),
            is_bounded_by_context=asked is None or asked > room,
            detach_ttl_s=(message.detach_ttl_s or DEFAULT_DETACH_TTL_S) if is_detachable else None,
        )

    def _check_prompt(self, message: inference_pb2.GenerateRequest) -> None:
        kind = message.WhichOneof("prompt")
        if kind is None:
            raise InvalidArgument("prompt", "set one of text, token_ids and chat")
        if kind == "token_ids":
            # The length first: looking at millions of ids would hold up the loop.
            self._check_length("token_ids", len(message.token_ids.ids))
            self.check_token_ids("token_ids.ids", message.token_ids.ids)
        if kind == "text":
            if not message.text:
                raise InvalidArgument("text", "the prompt is empty")
            self.check_text("text", message.text)
        if kind == "chat":
            self.check_chat("chat", message.chat)

    def _check_length(self, field: str, num_prompt_tokens: int) -> None:
        context_length = self._spec.context_length
        if num_prompt_tokens == 0:
            raise InvalidArgument(field, "the prompt has no tokens")
        if num_prompt_tokens + 1 > context_length:
            raise InvalidArgument(
                field,
                f"the prompt has {num_prompt_tokens} tokens, and the context of {context_length} "
                "must hold at least one more",
            )

    def check_text(self, field: str, text: str) -> None:
        """Raises InvalidArgument for a text that is too large to work on."""
        _check_bytes(field, text, self._limits.max_text_bytes)

    def check_num_token_ids(self, field: str, token_ids: Sequence[int]) -> None:
        """Raises InvalidArgument for more ids than one call may turn into text."""
        _check_count(field, token_ids, self._limits.max_token_ids)

    def check_chat(self, field: str, chat: inference_pb2.ChatPrompt) -> None:
        """Raises InvalidArgument for a conversation without turns or with too many."""
        limit = self._limits.max_chat_messages
        if not 0 < len(chat.messages) <= limit:
            raise InvalidArgument(
                f"{field}.messages", f"{len(chat.messages)} messages: give 1 to {limit}"
            )
        num_bytes = 0
        for index, message in enumerate(chat.messages):
            num_bytes += len(message.content.encode())
            if num_bytes > self._limits.max_text_bytes:
                limit = self._limits.max_text_bytes
                raise InvalidArgument(f"{field}.messages", f"over {limit} bytes in all")
            if not message.role:
                raise InvalidArgument(f"{field}.messages[{index}].role", "the role is empty")

    def _check_detach(self, message: inference_pb2.GenerateRequest) -> None:
        _check_policy(message.disconnect)
        if message.disconnect == inference_pb2.DISCONNECT_POLICY_DETACH:
            _require_field("detach_ttl_s", message.detach_ttl_s, 0, self._limits.max_detach_ttl_s)
        elif message.detach_ttl_s:
            raise InvalidArgument("detach_ttl_s", "the request is not to be detached")

    def _check_sampling(self, sampling: SamplingParams) -> None:
        # NaN fails every comparison, so each line says what must hold.
        limit = self._limits.max_temperature
        vocab_size = self._spec.vocab_size
        _require_range("temperature", sampling.temperature, f"[0, {limit:g}]", 0, limit)
        _require_range("top_k", sampling.top_k, f"[0, {vocab_size}]", 0, vocab_size)
        _require_range("top_p", sampling.top_p, "(0, 1]", math.nextafter(0, 1), 1)
        _require_range("min_p", sampling.min_p, "[0, 1]", 0, 1)

    def _check_choices(self, sampling: inference_pb2.SamplingParams) -> None:
        limits = self._limits
        if sampling.HasField("n"):
            _require_field("sampling.n", sampling.n, 1, limits.max_choices)
        most = limits.max_first_choice
        _require_field("sampling.first_choice", sampling.first_choice, 0, most)

    def _check_beam(self, message: inference_pb2.GenerateRequest) -> None:
        limits, beam = self._limits, message.beam
        _require_field("beam.width", beam.width, 2, limits.max_beam_width)
        if beam.HasField("num_return"):
            _require_field("beam.num_return", beam.num_return, 1, beam.width)
        penalty, most = beam.length_penalty, limits.max_length_penalty
        _require_field("beam.length_penalty", penalty, -most, most)
        if beam.early_stopping not in inference_pb2.EarlyStopping.values():
            raise InvalidArgument("beam.early_stopping", f"{beam.early_stopping} is unknown")
        if message.stopping.stop_strings:
            raise InvalidArgument("stopping.stop_strings", "a beam search takes none")
        num_ends = len(message.stopping.stop_token_ids) + len(self._spec.eos_token_ids)
        if beam.width + num_ends > self._spec.vocab_size:
            raise InvalidArgument("beam.width", "the vocabulary is too small for so many beams")

    def _check_constraint(self, message: inference_pb2.GenerateRequest) -> None:
        field = str(message.WhichOneof("constraint"))
        if message.HasField("beam"):
            raise InvalidArgument(field, "a beam search takes no constraint")
        if field == "choice":
            self._check_options(message.choice.options)
        elif field == "json_object":
            if not message.json_object:
                raise InvalidArgument(field, "must be true, or absent")
        elif not getattr(message, field):
            raise InvalidArgument(field, "it is empty")
        else:
            _check_bytes(field, getattr(message, field), self._limits.max_constraint_bytes)

    def _check_options(self, options: Sequence[str]) -> None:
        field = "choice.options"
        if not options:
            raise InvalidArgument(field, "give at least one")
        _check_count(field, options, self._limits.max_choice_options)
        _check_bytes(field, "".join(options), self._limits.max_constraint_bytes)
        for index, option in enumerate(options):
            if not option:
                raise InvalidArgument(f"{field}[{index}]", "an option is empty")

    def _check_stopping(self, stopping: inference_pb2.StoppingParams) -> None:
        limits = self._limits
        if stopping.HasField("max_tokens") and stopping.max_tokens < 1:
            raise InvalidArgument("stopping.max_tokens", "must be at least 1")
        _check_count("stopping.stop_strings", stopping.stop_strings, limits.max_stop_strings)
        for index, text in enumerate(stopping.stop_strings):
            field = f"stopping.stop_strings[{index}]"
            if not text:
                raise InvalidArgument(field, "a stop string is empty")
            _check_bytes(field, text, limits.max_stop_string_bytes)
        _check_count("stopping.stop_token_ids", stopping.stop_token_ids, limits.max_stop_token_ids)
        self.check_token_ids("stopping.stop_token_ids", stopping.stop_token_ids)


def num_sequences_of(message: inference_pb2.GenerateRequest) -> tuple[int, str]:
    """How many sequences a checked message asks for, and the field that says so."""
    if message.HasField("beam"):
        return message.beam.width, "beam.width"
    return message.sampling.n or 1, "sampling.n"


def _require_range(name: str, value: float, range_text: str, lowest: float, highest: float) -> None:
    if not lowest <= value <= highest:
        raise InvalidArgument(f"sampling.{name}", f"{value:g} is not in {range_text}")


def _require_field(field: str, value: float, lowest: float, highest: float) -> None:
    if not lowest <= value <= highest:
        raise InvalidArgument(field, f"{value:g} is not in [{lowest:g}, {highest:g}]")


def _check_policy(policy: inference_pb2.DisconnectPolicy) -> None:
    if policy not in inference_pb2.DisconnectPolicy.values():
        raise InvalidArgument("disconnect", f"{policy} is unknown")


def _check_bytes(field: str, text: str, limit: int) -> None:
    num_bytes = len(text.encode())
    if num_bytes > limit:
        raise InvalidArgument(field, f"{num_bytes} bytes, the limit is {limit}")


def _check_count(field: str, items: Sequence[object], limit: int) -> None:
    if len(items) > limit:
        raise InvalidArgument(field, f"{len(items)} entries, the limit is {limit}")


def _resolved_sampling(message: inference_pb2.SamplingParams) -> SamplingParams:
    """The parameters in force: those given, defaults, and a seed drawn when there is none."""
    defaults = SamplingParams()
    has = message.HasField
    return SamplingParams(
        temperature=message.temperature if has("temperature") else defaults.temperature,
        top_k=message.top_k if has("top_k") else defaults.top_k,
        top_p=message.top_p if has("top_p") else defaults.top_p,
        min_p=message.min_p if has("min_p") else defaults.min_p,
        seed=message.seed if has("seed") else int.from_bytes(os.urandom(8)),
    )


def _resolved_beam(message: inference_pb2.BeamParams) -> BeamParams:
    defaults = BeamParams(message.width)
    has = message.HasField
    return BeamParams(
        width=message.width,
        length_penalty=message.length_penalty if has("length_penalty") else defaults.length_penalty,
        early_stopping=EarlyStopping(message.early_stopping or defaults.early_stopping.value),
        num_return=message.num_return if has("num_return") else defaults.num_return,
    )
