"""What each token id stands for in bytes: the one ground of decoding, streaming or not.

The text of a sequence is the UTF-8 decoding of its tokens' bytes joined; bytes that are no UTF-8
show as U+FFFD, one for each maximal invalid part (Unicode 15, section 3.9). For byte-level models
that is what the tokenizers library does as well. For SentencePiece models it differs from it only
where byte tokens form no UTF-8: there the library replaces a whole run of them, bytes that it would
have shown already included, which a stream can't take back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

SPACE_PIECE = "▁"  # SentencePiece's mark for a space
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte (bytes_to_unicode in its encoder.py).

    Printable Latin-1 stands for itself; the other bytes take the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + rank): byte for rank, byte in enumerate(others)
    }


BYTE_ALPHABET = _byte_alphabet()
_TO_LATIN_1 = str.maketrans({char: chr(byte) for char, byte in BYTE_ALPHABET.items()})
_OUTSIDE_ALPHABET = re.compile(f"[^{re.escape(''.join(BYTE_ALPHABET))}]")


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token. A token with a character outside of the byte alphabet, such
    as an added token with a space, is plain text."""
    if _OUTSIDE_ALPHABET.search(token):
        return token.encode()
    return token.translate(_TO_LATIN_1).encode("latin-1")


def sentencepiece_bytes(token: str) -> bytes:
    """The bytes of a SentencePiece token: one byte for <0xAB>, else the text."""
    if match := _BYTE_PIECE.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace(SPACE_PIECE, " ").encode()


def join_text(parts: Iterable[bytes]) -> str:
    """The text of tokens given as bytes."""
    return b"".join(parts).decode("utf-8", "replace")
