"""Writes expected_ids.json: what transformers makes of the corpus. Takes a minute or so.

    python -m tests.text.make_expected_ids MODEL.gguf

transformers builds a tokenizer from the GGUF file. Where its conversion leaves out what the
published tokenizer.json of a family has, that is put in here: the digits of SmolLM2 (a cut before
each), whole pieces of Llama 3 (ignore_merges), and Qwen 2's composition (NFC).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.text.corpus import NASTY_TEXTS, sentencepiece_vocabulary

EXPECTED_FILE = Path(__file__).with_name("expected_ids.json")


def main(model_path: Path) -> None:
    from tokenizers import Regex, normalizers, pre_tokenizers
    from transformers import AutoTokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    tokenizer: Any = AutoTokenizer.from_pretrained(model_path.parent, gguf_file=model_path.name)
    backend = tokenizer.backend_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    unsplit = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    styles: dict[str, Any] = {
        "gpt-2": gpt2,
        "smollm": pre_tokenizers.Sequence([digits, gpt2]),
        **{
            name: pre_tokenizers.Sequence(
                [pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[name]), "isolated"), unsplit]
            )
            for name in ("llama-bpe", "qwen2", "tekken")
        },
    }
    expected = {}
    for name, pre_tokenizer in styles.items():
        backend.pre_tokenizer = pre_tokenizer
        backend.model.ignore_merges = name in ("llama-bpe", "tekken")
        backend.normalizer = normalizers.NFC() if name == "qwen2" else None
        expected[name] = _ids(tokenizer)
    expected["sentencepiece"] = _ids(_sentencepiece())
    lines = (f"{json.dumps(name)}: {json.dumps(ids)}" for name, ids in expected.items())
    EXPECTED_FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _ids(tokenizer: Any) -> dict[str, list[int]]:
    return {name: tokenizer(text).input_ids for name, text in NASTY_TEXTS.items()}


def _sentencepiece() -> Any:
    from transformers import LlamaTokenizer
    from transformers.tokenization_utils_base import generate_merges

    tokens, scores, _ = sentencepiece_vocabulary()
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = generate_merges(vocab, dict(zip(tokens, scores, strict=True)))
    return LlamaTokenizer(vocab=vocab, merges=merges, add_bos_token=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
