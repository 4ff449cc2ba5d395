"""The model that simulated workers run: its next token depends on every token before, on the seed,
the sequence index and the position, and on nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler_svc.core.messages import FinishReason, NewRequest

NUM_TOKEN_IDS = 50
ROOT = 1


def extend(state: int, token: int) -> int:
    """What a slot holds after `token`, where the slot before holds `state`."""
    return hash((state, token))


def draw(states: Sequence[int], seed: int, index: int, position: int) -> int:
    """The token at `position` after reading the slots' `states` through a block table."""
    return hash((tuple(states), seed, index, position)) % NUM_TOKEN_IDS


def states_of(token_ids: Sequence[int], block_size: int) -> list[int]:
    """The last filled slot of each block, which is what attention reads in this model."""
    states, state = [], ROOT
    for position, token in enumerate(token_ids, start=1):
        state = extend(state, token)
        if position % block_size == 0 or position == len(token_ids):
            states.append(state)
    return states


def answer(request: NewRequest, index: int, block_size: int) -> tuple[list[int], FinishReason]:
    """What sequence `index` of `request` must get when nothing is in its way: the tokens that
    the client sees and the reason of their end."""
    tokens = list(request.prompt_token_ids)
    output: list[int] = []
    while True:
        seed = request.sampling.seed
        token = draw(states_of(tokens, block_size), seed, index, len(tokens))
        if token in request.eos_token_ids:
            return output, FinishReason.EOS
        if token in request.stop_token_ids:
            return output, FinishReason.STOP_TOKEN
        tokens.append(token)
        output.append(token)
        if len(output) == request.max_tokens:
            return output, FinishReason.MAX_TOKENS
