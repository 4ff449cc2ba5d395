"""Beam search of transformers on the same model, in float32: the oracle of the beams' tests.

    python -m tests.e2e.beam_reference MODEL.gguf

writes data/beams.json anew: for each prompt the four best continuations of four beams, with their
scores. Ids are without the end of sequence, as Quire delivers them.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from shared.model_files import read_model_spec
from tests.e2e.reference import load_model, read_greedy

BEAMS_FILE = Path(__file__).parent / "data" / "beams.json"
WIDTH = 4
NUM_TOKENS = 12
PROMPTS = (
    "fact",
    "story",
    "list",
    "python",
    "json",
    "maths",
    "numbers",
    "chinese",
    "chat system",
    "chat turns",
)


@dataclass(frozen=True, slots=True)
class BeamContinuation:
    """One of the best continuations of a prompt."""

    token_ids: list[int]
    is_ended: bool
    """Whether an end of sequence follows."""
    score: float


def read_beams() -> dict[str, list[BeamContinuation]]:
    """The kept continuations, best first, by the prompt's name."""
    return {
        name: [BeamContinuation(**kept) for kept in beams]
        for name, beams in json.loads(BEAMS_FILE.read_text()).items()
    }


@torch.inference_mode()
def search(
    model: LlamaForCausalLM, prompt_token_ids: list[int], eos_token_ids: list[int]
) -> list[BeamContinuation]:
    """The best continuations, with transformers' default length penalty and early stopping."""
    output = model.generate(
        torch.tensor([prompt_token_ids]),
        num_beams=WIDTH,
        num_return_sequences=WIDTH,
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
        eos_token_id=eos_token_ids,
        pad_token_id=eos_token_ids[0],
        return_dict_in_generate=True,
        output_scores=True,
    )
    found = []
    scores = output.sequences_scores.tolist()
    for row, score in zip(output.sequences.tolist(), scores, strict=True):
        token_ids = row[len(prompt_token_ids) :]
        ends = [at for at, token in enumerate(token_ids) if token in eos_token_ids]
        found.append(
            BeamContinuation(token_ids[: ends[0]] if ends else token_ids, bool(ends), score)
        )
    return found


def main() -> None:
    torch.set_num_threads(1)  # several wait for each other on a busy machine
    path = Path(sys.argv[1])
    model, spec, greedy = load_model(path), read_model_spec(path), read_greedy()
    lines = []
    for name in PROMPTS:
        found = search(model, greedy[name].prompt_token_ids, list(spec.eos_token_ids))
        kept = [
            {"token_ids": b.token_ids, "is_ended": b.is_ended, "score": round(b.score, 6)}
            for b in found
        ]
        lines.append(f"{json.dumps(name)}: {json.dumps(kept)}")
        print(name, [(len(b.token_ids), b.is_ended, round(b.score, 4)) for b in found], flush=True)
    BEAMS_FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
