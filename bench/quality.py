"""What a mode of computing costs in quality: the mean negative log-likelihood of a public text.

    python -m bench.quality --model FILE [--tokens 1500] [--json quality.json]

Each mode predicts the same tokens, each from all that stand before it in the text, as a prompt is
computed in chunks. It is told in nats a token, beside float32 arithmetic and cache, with the share
of tokens whose likeliest successor is the same. The text (texts/coriolanus.txt) opens Shakespeare's
Coriolanus.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from kernels.interface import AttentionBatch
from scheduler_svc.text.tokenizer import TextModel
from shared.model_files import read_model_spec
from shared.model_spec import ModelSpec
from worker_svc.config import EngineConfig
from worker_svc.kv_cache import pool_shape
from worker_svc.models.registry import LoadedModel, load_model

TEXT = Path(__file__).with_name("texts") / "coriolanus.txt"
BLOCK_SIZE = 16
CHUNK_TOKENS = 256
CPU = torch.device("cpu")
REFERENCE = "float32"
MODES: dict[str, tuple[str, str]] = {
    REFERENCE: ("float32", "float32"),
    "float32, KV in bfloat16": ("float32", "bfloat16"),
    "float32, KV in int8": ("float32", "int8"),
    "auto, KV in float32": ("auto", "float32"),
    "auto": ("auto", "auto"),
    "auto, KV in int8": ("auto", "int8"),
}
"""`--dtype` and `--kv-cache-dtype` of the worker by mode."""


@dataclass(frozen=True, slots=True)
class Quality:
    """One mode's figures."""

    mean_nll: float
    """Nats a token."""
    relative: float
    """mean_nll by that of float32, minus 1."""
    same_best: float
    """Share of positions at which the likeliest token is float32's."""


def log_likelihoods(
    model: LoadedModel, spec: ModelSpec, token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each of `token_ids` [n] int64 but the first: its log-probability, [n - 1] float64, and
    the likeliest token in its place, [n - 1] int64. n is at most the context's length."""
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    shape = pool_shape(spec, BLOCK_SIZE, model.kv_dtype, num_blocks)
    kv_cache = torch.zeros(shape, dtype=model.kv_dtype)
    log_probs, best = [], []
    for start in range(0, len(token_ids) - 1, CHUNK_TOKENS):
        end = min(start + CHUNK_TOKENS, len(token_ids) - 1)
        rows = torch.arange(end - start)
        logits = model.decoder.forward(
            token_ids[start:end], _chunk(start, end, num_blocks), kv_cache, rows
        ).logits
        following = token_ids[start + 1 : end + 1]
        log_probs.append(torch.log_softmax(logits.double(), dim=-1)[rows, following])
        best.append(logits.argmax(dim=-1))
    return torch.cat(log_probs), torch.cat(best)


def _chunk(start: int, end: int, num_blocks: int) -> AttentionBatch:
    """Tokens [start, end) of the only sequence, whose block i is block i of the cache."""
    positions = torch.arange(start, end)
    return AttentionBatch(
        query_start=torch.tensor([0, end - start], dtype=torch.int32),
        seq_lens=torch.tensor([end], dtype=torch.int32),
        block_tables=torch.arange(num_blocks, dtype=torch.int32)[None],
        slots=positions,
        positions=positions,
        max_query_len=end - start,
        max_seq_len=end,
    )


def compare(model_path: Path, num_tokens: int, num_threads: int) -> dict[str, Quality]:
    """Each mode's figures over the first `num_tokens` predictions."""
    spec = read_model_spec(model_path)
    text = TEXT.read_text(encoding="utf-8")
    token_ids = torch.tensor(TextModel.load(spec).encode(text)[: num_tokens + 1])
    if len(token_ids) <= num_tokens or num_tokens > spec.context_length:
        raise SystemExit(f"the text and the context allow fewer than {num_tokens} predictions")
    qualities: dict[str, Quality] = {}
    reference: tuple[float, torch.Tensor] | None = None
    for mode, (dtype, kv_dtype) in MODES.items():
        config = EngineConfig(model_path, dtype=dtype, kv_dtype=kv_dtype, num_threads=num_threads)
        model = load_model(spec, config, CPU, CHUNK_TOKENS, lambda _: None)
        log_probs, best = log_likelihoods(model, spec, token_ids)
        mean_nll = -float(log_probs.mean())
        reference = reference or (mean_nll, best)
        qualities[mode] = Quality(
            mean_nll=mean_nll,
            relative=mean_nll / reference[0] - 1.0,
            same_best=float((best == reference[1]).double().mean()),
        )
    return qualities


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, required=True, help="GGUF file or folder")
    parser.add_argument("--tokens", type=int, default=1500, help="predictions")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--json", type=Path, default=None, help="write the figures to this file")
    args = parser.parse_args()
    qualities = compare(args.model, args.tokens, args.threads)
    print(f"{args.model.name}, {args.tokens} predictions of {TEXT.name}")
    for mode, quality in qualities.items():
        print(
            f"  {mode:24} {quality.mean_nll:.5f} nats a token, {quality.relative:+.3%} beside "
            f"{REFERENCE}, same best token at {quality.same_best:.1%}"
        )
    if args.json is not None:
        figures = {mode: asdict(quality) for mode, quality in qualities.items()}
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
