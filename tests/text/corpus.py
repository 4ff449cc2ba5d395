# ruff: noqa: RUF001
"""Texts that break tokenizers, and a small SentencePiece vocabulary to break."""

from __future__ import annotations

NASTY_TEXTS = {
    "empty": "",
    "plain": "The quick brown fox jumps over the lazy dog.",
    "one space": " ",
    "spaces": "a  b   c    d     e                 f",
    "edges": "   both ends   ",
    "line ends": "one\ntwo\r\nthree\n\n\nfour\n \n five\r\rsix",
    "tabs": "\tif x:\n\t\treturn\t\ty\n",
    "odd spaces": "a\u00a0b\u2003c\u3000d\u200be\ufefff\u2028g\u0085h",
    "contractions": "I'm you're he'll WE'VE it'S don't 'tis o'clock ''s",
    "digits": "7 42 1234567890 3.14159 1,000,000 0x1F 2024-01-31",
    "spaces before digits": "a  1   22\n\n  333",
    "other numbers": "½ ²³ ٣٤٥ Ⅷ 〇 一二三 ①②",
    "cjk": "你好，世界。これは日本語です。한국어 문장입니다.",
    "rtl": "שלום עולם مرحبا بالعالم \u202eabc\u202c",
    "combining": "e\u0301 é n\u0303 a\u0300\u0316\u0323 Z\u0351\u036b\u0343a\u034dlgo ก็",
    "emoji": "😀 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪🇫🇷 ❤️ #️⃣",
    "control": "a\x00b\x01c\x07d\x1be\x7ff",
    "rare planes": "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𠜎𠜱 \U0010fffd \ufffd \ufffe",
    "code": "def f(x: int) -> int:\n    return {k: v**2 for k, v in x.items() if v != 0}  # ok\n",
    "json": '{"a": [1, 2.5e-3, null], "b": "\\u00e9\\n"}',
    "markup": "<div class='x'>&amp;<br/></div> <s>gone</s> <unk>",
    "url": "https://example.com/a/b?c=d&e=%20#f",
    "long word": "pneumono" * 60,
    "long run": "=" * 257 + "!" * 130,
    "long digits": "9" * 300,
    "mixed scripts": "Привет мир Ελληνικά हिन्दी ไทย ქართული ⠃⠗⠇",
    "special tokens": "a<|im_start|>user\nb<|im_end|> <|endoftext|>",
    "near special tokens": "<|im_start| <|im_end|<|im_end|>> < |im_end|>",
    "space marks": "a▁b ▁▁ c",
    "bytes": "<0x41><0xE4>",
}

_PIECES = (
    "▁", "▁t", "he", "▁the", "▁qu", "ick", "▁quick", "in", "ing", "er", "or", "ld", "▁w", "▁wor",
    "▁▁", "▁▁▁▁", "lo", "▁he", "▁hel", "▁hello", "日", "本", "日本", "é", "12", "<s", "s>",
)  # fmt: skip


def sentencepiece_vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and token types of a vocabulary with byte fallback, in GGUF's terms."""
    letters = [chr(code) for code in range(0x21, 0x7F)]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3, *[6] * 256]
    pieces = [*_PIECES, *(letter for letter in letters if letter not in _PIECES)]
    tokens += pieces
    types += [1] * len(pieces)
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces))]
    return tokens, scores, types
