"""Admission: checks a GenerateRequest against every limit and makes the core's request of it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from protos.quire.inference.v1 import inference_pb2
from scheduler_svc.core.constraint import TokenConstraint
from scheduler_svc.core.messages import DEFAULT_TENANT, NewRequest
from scheduler_svc.decoding_admission import GREEDY, DecodingAdmission
from scheduler_svc.limits import Limits, check_bytes, check_count, check_range, check_token_ids
from scheduler_svc.tenancy import Tenancy
from shared.errors import InvalidArgument, NotFound
from shared.ids import RequestId
from shared.model_spec import ModelSpec

DEFAULT_DETACH_TTL_S = 60


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
    include_stop_string: bool = False
    """The text ends with the stop string that ended it."""
    min_tokens: int = 0
    """The text of so many tokens is not searched for stop strings."""
    bad_words: tuple[str, ...] = ()
    """As given; their token ids are among the request's rules."""


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
        self._decoding = DecodingAdmission(spec, self._limits)

    def check_model(self, name: str) -> None:
        """Raises NotFound unless `name` is the served model; empty means the only one."""
        if name and name != self._spec.name:
            raise NotFound(f"there is no model {name!r}; this server has {self._spec.name!r}")

    def check_token_ids(self, field: str, token_ids: Sequence[int]) -> None:
        """Raises InvalidArgument for the first id that is not in the vocabulary."""
        check_token_ids(field, token_ids, self._spec.vocab_size)

    def check(self, message: inference_pb2.GenerateRequest) -> None:
        """Checks everything but the prompt's tokens; raises InvalidArgument or NotFound."""
        limits = self._limits
        self.check_model(message.model)
        check_bytes("request_id", message.request_id, limits.max_request_id_bytes)
        check_bytes("cache_salt", message.cache_salt, limits.max_cache_salt_bytes)
        if not -limits.max_priority <= message.priority <= limits.max_priority:
            bound = limits.max_priority
            raise InvalidArgument("priority", f"{message.priority} is not in [-{bound}, {bound}]")
        self._check_detach(message)
        self._check_prompt(message)
        self._decoding.check(message)
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
        check_bytes("request_id", message.request_id, self._limits.max_request_id_bytes)
        _check_policy(message.disconnect)
        policy = message.disconnect or inference_pb2.DISCONNECT_POLICY_DETACH
        return self._tenancy.request_id(tenant, message.request_id), policy

    def admit(
        self,
        message: inference_pb2.GenerateRequest,
        prompt_token_ids: Sequence[int],
        *,
        bad_words: Sequence[Sequence[int]] = (),
        constraint: TokenConstraint | None = None,
        tenant: str = DEFAULT_TENANT,
        deadline_s: float | None = None,
    ) -> AdmittedRequest:
        """The request of a checked message; `prompt_token_ids` is its prompt and `bad_words` its
        bad words, tokenized, and `constraint` its constraint, compiled. Its caller is `tenant`, and
        stops waiting in `deadline_s` seconds.

        Raises InvalidArgument when the prompt is empty or leaves no room in the context, and when
        no token may be drawn.
        """
        field = message.WhichOneof("prompt") or "prompt"
        num_prompt_tokens = len(prompt_token_ids)
        self._check_length(field, num_prompt_tokens)
        stopping = message.stopping
        room = self._spec.context_length - num_prompt_tokens
        asked = stopping.max_tokens if stopping.HasField("max_tokens") else None
        max_tokens = room if asked is None else min(asked, room)
        beam = self._decoding.beam(message)
        is_detachable = message.disconnect == inference_pb2.DISCONNECT_POLICY_DETACH
        client_id = message.request_id or secrets.token_hex(16)
        response = message.response
        request = NewRequest(
            request_id=self._tenancy.request_id(tenant, client_id),
            prompt_token_ids=tuple(prompt_token_ids),
            sampling=self._decoding.sampling(message, bad_words) if beam is None else GREEDY,
            max_tokens=max_tokens,
            eos_token_ids=self.eos_token_ids(message),
            stop_token_ids=frozenset(stopping.stop_token_ids),
            num_sequences=(message.sampling.n or 1) if beam is None else beam.num_return,
            first_choice=message.sampling.first_choice,
            beam=beam,
            constraint=constraint,
            num_prompt_logprobs=self._decoding.num_logprobs(response, "num_prompt_logprobs"),
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
            include_stop_string=stopping.include_stop_string,
            min_tokens=stopping.min_tokens,
            bad_words=tuple(message.sampling.bad_words),
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
        check_bytes(field, text, self._limits.max_text_bytes)

    def check_num_token_ids(self, field: str, token_ids: Sequence[int]) -> None:
        """Raises InvalidArgument for more ids than one call may turn into text."""
        check_count(field, token_ids, self._limits.max_token_ids)

    def check_chat(self, field: str, chat: inference_pb2.ChatPrompt) -> None:
        """Raises InvalidArgument for a conversation without turns or with too many."""
        limit = self._limits.max_chat_messages
        if not 0 < len(chat.messages) <= limit:
            raise InvalidArgument(
                f"{field}.messages", f"{len(chat.messages)} messages: give 1 to {limit}"
            )
        num_bytes = 0
        for index, message in enumerate(chat.messages):
            num_bytes += len(message.role.encode()) + len(message.content.encode())
            if num_bytes > self._limits.max_text_bytes:
                limit = self._limits.max_text_bytes
                raise InvalidArgument(f"{field}.messages", f"over {limit} bytes in all")
            if not message.role:
                raise InvalidArgument(f"{field}.messages[{index}].role", "the role is empty")

    def _check_detach(self, message: inference_pb2.GenerateRequest) -> None:
        _check_policy(message.disconnect)
        if message.disconnect == inference_pb2.DISCONNECT_POLICY_DETACH:
            check_range("detach_ttl_s", message.detach_ttl_s, 0, self._limits.max_detach_ttl_s)
        elif message.detach_ttl_s:
            raise InvalidArgument("detach_ttl_s", "the request is not to be detached")

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
            check_bytes(field, getattr(message, field), self._limits.max_constraint_bytes)

    def _check_options(self, options: Sequence[str]) -> None:
        field = "choice.options"
        if not options:
            raise InvalidArgument(field, "give at least one")
        check_count(field, options, self._limits.max_choice_options)
        check_bytes(field, "".join(options), self._limits.max_constraint_bytes)
        for index, option in enumerate(options):
            if not option:
                raise InvalidArgument(f"{field}[{index}]", "an option is empty")


def num_sequences_of(message: inference_pb2.GenerateRequest) -> tuple[int, str]:
    """How many sequences a checked message asks for, and the field that says so."""
    if message.HasField("beam"):
        return message.beam.width, "beam.width"
    return message.sampling.n or 1, "sampling.n"


def _check_policy(policy: inference_pb2.DisconnectPolicy) -> None:
    if policy not in inference_pb2.DisconnectPolicy.values():
        raise InvalidArgument("disconnect", f"{policy} is unknown")
