"""The model that simulated workers run: its next token depends on every token before, on the seed,
the sequence index and the position, and on nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from scheduler_svc.core.beam import BeamSearch, num_candidates
from scheduler_svc.core.messages import FinishReason, NewRequest

NUM_TOKEN_IDS = 50
ROOT = 1


def extend(state: int, token: int) -> int:
    """What a slot holds after `token`, where the slot before holds `state`."""
    return hash((state, token))


def draw(
    states: Sequence[int],
    seed: int,
    index: int,
    position: int,
    allowed: Sequence[int] | None = None,
) -> int:
    """The token at `position`, of those `allowed`, after reading the slots' `states` through a
    block table."""
    among = range(NUM_TOKEN_IDS) if allowed is None else allowed
    return among[hash((tuple(states), seed, index, position)) % len(among)]


def states_of(token_ids: Sequence[int], block_size: int) -> list[int]:
    """The last filled slot of each block, which is what attention reads in this model."""
    states, state = [], ROOT
    for position, token in enumerate(token_ids, start=1):
        state = extend(state, token)
        if position % block_size == 0 or position == len(token_ids):
            states.append(state)
    return states


def candidates(states: Sequence[int], count: int) -> tuple[list[int], list[float]]:
    """The likeliest next tokens, best first, and their log-probabilities; many are equal."""
    log_probs = [-(hash((tuple(states), token)) % 16) / 4.0 for token in range(NUM_TOKEN_IDS)]
    best = sorted(range(NUM_TOKEN_IDS), key=lambda token: (-log_probs[token], token))[:count]
    return best, [log_probs[token] for token in best]


def beam_answer(request: NewRequest, block_size: int) -> list[tuple[list[int], FinishReason]]:
    """The same for each sequence that a beam search delivers."""
    assert request.beam is not None
    search = BeamSearch(request.beam, request.end_ids, request.max_tokens)
    count = num_candidates(request.beam.width, len(request.end_ids))
    beams = [list(request.prompt_token_ids)]
    while beams:
        found = [candidates(states_of(tokens, block_size), count) for tokens in beams]
        beams = [[*beams[parent], token] for parent, token in search.advance(found)]
    answers = []
    for hypothesis in search.hypotheses[: request.num_sequences]:
        reason = FinishReason.MAX_TOKENS
        if hypothesis.end_token_id is not None:
            is_eos = hypothesis.end_token_id in request.eos_token_ids
            reason = FinishReason.EOS if is_eos else FinishReason.STOP_TOKEN
        answers.append((hypothesis.token_ids, reason))
    return answers


def is_beam_answer(
    request: NewRequest,
    got: list[tuple[list[int], FinishReason]],
    block_size: int,
    pools: Iterable[int],
) -> bool:
    """Whether `got` is what a search gives that had its own number of tokens, or as many as one
    of the pools of so many blocks holds."""
    if got == beam_answer(request, block_size):
        return True
    num_prompt = len(request.prompt_token_ids)
    num_shared = num_prompt // block_size
    for num_blocks in pools:
        num_own = (num_blocks - num_shared) // request.num_beams
        room = (num_shared + num_own) * block_size + 1 - num_prompt
        if num_own > 0 and 0 < room < request.max_tokens:
            cut = beam_answer(replace(request, max_tokens=room), block_size)
            at_end = FinishReason.CONTEXT_LIMIT
            if got == [(t, at_end if r is FinishReason.MAX_TOKENS else r) for t, r in cut]:
                return True
    return False


def answers_of(request: NewRequest, block_size: int) -> list[tuple[list[int], FinishReason]]:
    """What each sequence of `request` must get."""
    if request.beam is not None:
        return beam_answer(request, block_size)
    return [answer(request, index, block_size) for index in range(request.num_sequences)]


def answer(request: NewRequest, index: int, block_size: int) -> tuple[list[int], FinishReason]:
    """What sequence `index` of `request` must get when nothing is in its way: the tokens that
    the client sees and the reason of their end."""
    tokens = list(request.prompt_token_ids)
    output: list[int] = []
    constraint = None if request.constraint is None else request.constraint.copy()
    while True:
        seed = request.sampling.seed
        mask = None if constraint is None else constraint.mask
        allowed = None if mask is None else mask.token_ids
        token = draw(states_of(tokens, block_size), seed, index, len(tokens), allowed)
        if token in request.eos_token_ids:
            return output, FinishReason.EOS
        if token in request.stop_token_ids:
            return output, FinishReason.STOP_TOKEN
        tokens.append(token)
        output.append(token)
        if constraint is not None and not constraint.accept(token):
            return output, FinishReason.CONSTRAINT_COMPLETE
        if len(output) == request.max_tokens:
            return output, FinishReason.MAX_TOKENS
