"""Thirty prompts of many kinds, whose greedy continuations are kept in data/greedy.json."""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import MappingProxyType

from bench.workload import WORDS

Messages = list[dict[str, str]]


def _words(seed: int, count: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def _user(content: str) -> Messages:
    return [{"role": "user", "content": content}]


TEXTS: Mapping[str, str] = MappingProxyType(
    {
        "one letter": "a",
        "one space": " ",
        "one newline": "\n",
        "one emoji": "🙂",
        "fact": "The capital of France is",
        "story": "Once upon a time, in a small village by the sea, there lived",
        "list": "Three reasons to learn to cook:\n1.",
        "letter": "Dear Sir or Madam,\n\nI am writing to complain about",
        "python": "def fibonacci(n: int) -> int:\n    ",
        "c": "#include <stdio.h>\n\nint main(void) {\n\tfor (int i = 0; i < 10; i++) {\n",
        "json": '{"name": "Ada", "born": 1815, "works": [',
        "sql": "SELECT name, COUNT(*) FROM orders JOIN users ON",
        "html": '<!DOCTYPE html>\n<html>\n<head>\n<meta charset="utf-8">\n<title>',
        "markdown": "# Title\n\n| a | b |\n|---|---|\n| 1 | 2 |\n",
        "maths": "The derivative of x^2 + 3x is 2x + 3. The derivative of x^3 is",
        "numbers": "1, 1, 2, 3, 5, 8, 13, 21,",
        "chinese": "中国的首都是北京。日本的首都是",
        "japanese": "吾輩は猫である。名前はまだ",
        "korean": "안녕하세요, 저는",
        "russian": "Москва — столица",
        "arabic": "مرحبا بالعالم",
        "emoji": "I love 🍕 and 🍣 because 👩‍👩‍👧‍👦",
        "accents": "Café naïve: l'été dernier, à Besançon, j'ai",
        "spaces": "a    b\t\tc\n\n\n    d",
        "shouting": "THIS IS VERY IMPORTANT!!! PLEASE READ",
        "two thousand tokens": _words(7, 1960) + ". In short,",
    }
)

CHATS: Mapping[str, Messages] = MappingProxyType(
    {
        "chat question": _user("Why is the sky blue? Answer in two sentences."),
        "chat code": _user("Write a Python function that reverses a list."),
        "chat system": [
            {"role": "system", "content": "You answer in one word."},
            {"role": "user", "content": "What is the opposite of hot?"},
        ],
        "chat turns": [
            {"role": "user", "content": "My name is Ida."},
            {"role": "assistant", "content": "Nice to meet you, Ida!"},
            {"role": "user", "content": "What is my name?"},
        ],
    }
)
