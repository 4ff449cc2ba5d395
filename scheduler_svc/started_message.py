"""The first message of a stream: it tells every parameter that is in force."""

from __future__ import annotations

from protos.quire.inference.v1 import inference_pb2
from scheduler_svc.admission import AdmittedRequest
from scheduler_svc.core.messages import RequestStarted
from shared.sampling import BeamParams


def started_message(
    admitted: AdmittedRequest, event: RequestStarted, model_name: str
) -> inference_pb2.GenerateResponse:
    """Of a request that `event` starts."""
    request = admitted.request
    started = inference_pb2.Started(
        request_id=admitted.client_id,
        model=model_name,
        max_tokens=request.max_tokens,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_cached_tokens=event.num_cached_tokens,
    )
    if request.beam is None:
        started.sampling.CopyFrom(_sampling_in_force(admitted))
    else:
        started.beam.CopyFrom(_beam_in_force(request.beam))
    return inference_pb2.GenerateResponse(started=started)


def _sampling_in_force(admitted: AdmittedRequest) -> inference_pb2.SamplingParams:
    request, sampling = admitted.request, admitted.request.sampling
    rules = sampling.rules
    return inference_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        n=request.num_sequences,
        first_choice=request.first_choice,
        typical_p=sampling.typical_p,
        repetition_penalty=rules.repetition_penalty,
        presence_penalty=rules.presence_penalty,
        frequency_penalty=rules.frequency_penalty,
        logit_bias=dict(zip(rules.bias_token_ids, rules.biases, strict=True)),
        allowed_token_ids=rules.allowed_token_ids,
        banned_token_ids=rules.banned_token_ids,
        bad_words=admitted.bad_words,
    )


def _beam_in_force(beam: BeamParams) -> inference_pb2.BeamParams:
    return inference_pb2.BeamParams(
        width=beam.width,
        length_penalty=beam.length_penalty,
        early_stopping=inference_pb2.EarlyStopping.Name(beam.early_stopping.value),
        num_return=beam.num_return,
    )
