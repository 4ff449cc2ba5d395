"""A model folder of a few kilobytes whose token ids are bytes, plus an end of sequence."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

EOS = 256
VOCAB_SIZE = 257
CONTEXT_LENGTH = 256
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'unknown' %}{{ raise_exception('no such role') }}"
    "{% endif %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "
)


def write_tiny_model(folder: Path) -> Path:
    """Writes the folder; a text's ids are its UTF-8 bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {_character(byte): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", {"chat_template": CHAT_TEMPLATE})
    _write_json(
        folder / "config.json",
        {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": 1,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": CONTEXT_LENGTH,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "eos_token_id": EOS,
        },
    )
    tensors = {"weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    header = json.dumps(tensors).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(4)
    (folder / "model.safetensors").write_bytes(content)
    return folder


def _character(byte: int) -> str:
    """GPT-2's printable stand-in for a byte: itself where printable, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    return chr(0x100 + [b for b in range(256) if b not in printable].index(byte))


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))
