"""Rules of token ids: each against itself written out plainly, and against transformers' own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from kernels import reference_logits
from shared.sampling import TokenRules
from worker_svc.logit_rules import RowRules, apply_rules

VOCAB_SIZE = 40
PROMPT = [3, 4, 5, 4, 3, 30]
OUTPUT = [7, 8, 7, 4, 9, 7]
ALL_RULES = TokenRules(
    repetition_penalty=1.25,
    presence_penalty=0.5,
    frequency_penalty=-0.25,
    bias_token_ids=(7, 12, 39),
    biases=(3.5, -2.0, 1.0),
    allowed_token_ids=tuple(range(2, 36)),
    banned_token_ids=(12, 13),
    bad_words=((14,), (9, 7, 15), (30, 7, 16), (8, 17), (7, 7)),
    min_tokens=7,
    end_token_ids=(20, 21),
)
SINGLE_RULES = {
    "repetition": TokenRules(repetition_penalty=1.25),
    "reward": TokenRules(repetition_penalty=0.5),
    "presence": TokenRules(presence_penalty=0.75),
    "frequency": TokenRules(frequency_penalty=1.5),
    "bias": TokenRules(bias_token_ids=(0, 39), biases=(-100.0, 100.0)),
    "allowed": TokenRules(allowed_token_ids=(7, 8)),
    "banned": TokenRules(banned_token_ids=(7, 8)),
    "bad words": TokenRules(bad_words=((14,), (9, 7, 15), (8, 17))),
    "min tokens": TokenRules(min_tokens=7, end_token_ids=(20, 21)),
    "enough tokens": TokenRules(min_tokens=6, end_token_ids=(20, 21)),
    "all": ALL_RULES,
}


def apply(logits: torch.Tensor, places: Sequence[int], rules: Sequence[RowRules]) -> None:
    apply_rules(logits, places, rules, reference_logits)


def logits_of(num_rows: int, seed: int = 3) -> torch.Tensor:
    generator = np.random.default_rng(seed)
    return torch.from_numpy(generator.normal(size=(num_rows, VOCAB_SIZE)).astype(np.float32) * 3)


def plainly(
    logits: np.ndarray, rules: TokenRules, prompt: Sequence[int], output: Sequence[int]
) -> np.ndarray:
    """The rules of `worker_svc.logit_rules` for one row, token by token."""
    tokens = [*prompt, *output]
    result = logits.astype(np.float32)
    for token in range(len(logits)):
        x = result[token]
        if token in tokens:
            penalty = np.float32(rules.repetition_penalty)
            x = x / penalty if x > 0 else x * penalty
        if token in output:
            x -= np.float32(
                rules.presence_penalty + rules.frequency_penalty * list(output).count(token)
            )
        for biased, bias in zip(rules.bias_token_ids, rules.biases, strict=True):
            if biased == token:
                x += np.float32(bias)
        is_word_end = any(
            word[-1] == token and tokens[len(tokens) - len(word) + 1 :] == list(word[:-1])
            for word in rules.bad_words
        )
        is_early_end = len(output) < rules.min_tokens and token in rules.end_token_ids
        is_foreign = bool(rules.allowed_token_ids) and token not in rules.allowed_token_ids
        if token in rules.banned_token_ids or is_word_end or is_early_end or is_foreign:
            x = np.float32(-np.inf)
        result[token] = x
    return result


def row_rules(rules: TokenRules, tokens: Sequence[int], num_prompt: int) -> RowRules:
    row = RowRules(rules, num_prompt)
    row.catch_up(np.array(tokens, np.int32))
    return row


@pytest.mark.parametrize("name", SINGLE_RULES)
def test_each_rule_equals_itself_written_out(name: str) -> None:
    rules = SINGLE_RULES[name]
    logits = logits_of(3)
    expected = logits.clone().numpy()
    expected[1] = plainly(expected[1], rules, PROMPT, OUTPUT)
    apply(logits, [1], [row_rules(rules, [*PROMPT, *OUTPUT], len(PROMPT))])
    np.testing.assert_array_equal(logits.numpy(), expected)


def test_rules_of_many_rows_stay_apart_and_counts_grow_with_the_tokens() -> None:
    """Token by token, as a decode does, and at once, as after a preemption: the same."""
    generator = np.random.default_rng(8)
    rules = [*SINGLE_RULES.values()]
    prompts = [generator.integers(0, VOCAB_SIZE, 1 + 60 * (i % 2)).tolist() for i in range(11)]
    rows = [RowRules(rule, len(prompt)) for rule, prompt in zip(rules, prompts, strict=True)]
    tokens = [list(prompt) for prompt in prompts]
    for step in range(90):
        logits = logits_of(len(rules), seed=step)
        expected = [
            plainly(logits[i].numpy(), rule, prompts[i], tokens[i][len(prompts[i]) :])
            for i, rule in enumerate(rules)
        ]
        again = logits.clone()
        for row, known in zip(rows, tokens, strict=True):
            row.catch_up(np.array(known, np.int32))
        apply(logits, range(len(rules)), rows)
        np.testing.assert_array_equal(logits.numpy(), np.stack(expected))
        if step % 30 == 29:
            anew = [
                row_rules(rule, known, len(prompt))
                for rule, known, prompt in zip(rules, tokens, prompts, strict=True)
            ]
            apply(again, range(len(rules)), anew)
            assert torch.equal(again, logits)
        for known in tokens:
            known.append(int(generator.integers(0, VOCAB_SIZE)))


def test_transformers_gives_the_same() -> None:
    words = [list(word) for word in ALL_RULES.bad_words]
    banned, ends = list(ALL_RULES.banned_token_ids), list(ALL_RULES.end_token_ids)
    biases = dict(zip(ALL_RULES.bias_token_ids, ALL_RULES.biases, strict=True))
    processors = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(ALL_RULES.repetition_penalty),
            SequenceBiasLogitsProcessor([[[token], bias] for token, bias in biases.items()]),
            SuppressTokensLogitsProcessor(banned),
            NoBadWordsLogitsProcessor(words),
            MinNewTokensLengthLogitsProcessor(len(PROMPT), ALL_RULES.min_tokens, ends),
        ]
    )
    rules = replace(ALL_RULES, presence_penalty=0.0, frequency_penalty=0.0, allowed_token_ids=())
    tokens = [*PROMPT, *OUTPUT]
    logits = logits_of(1)
    expected = processors(torch.tensor([tokens]), logits.clone())
    apply(logits, [0], [row_rules(rules, tokens, len(PROMPT))])
    torch.testing.assert_close(logits, expected)
    assert (logits == -torch.inf).sum() == 7, "12, 13, 14, 15, 7, 20, 21"
