"""The file of --quota-file: one line for each tenant, `*` for each that has no line.

# tenant  limits
acme      requests=32 tokens=400000 tokens_per_min=200000
*         requests=4 requests_per_min=60
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from pathlib import Path

from scheduler_svc.quotas import Quota, QuotaConfig
from shared.errors import ConfigError

OTHERS = "*"
KEYS = tuple(field.name for field in fields(Quota))


def read_quotas(path: Path, tenants: Collection[str]) -> QuotaConfig:
    """The quotas in `path`, of these `tenants`. Raises ConfigError with the line that is wrong."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--quota-file: cannot read {path}: {error}") from error
    quotas: dict[str, Quota] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"--quota-file: line {number} of {path}"
        name = words[0]
        if name != OTHERS and name not in tenants:
            raise ConfigError(f"{where}: no line of --token-file names {name!r}")
        if name in quotas:
            raise ConfigError(f"{where}: {name!r} has a line already")
        quotas[name] = _quota(words[1:], where)
    others = quotas.pop(OTHERS, Quota())
    return QuotaConfig(quotas, others)


def _quota(words: list[str], where: str) -> Quota:
    limits: dict[str, int] = {}
    for word in words:
        key, _, value = word.partition("=")
        if key not in KEYS or key in limits:
            raise ConfigError(f"{where}: {word!r} should be one of {', '.join(KEYS)}, with =NUMBER")
        if not (value.isascii() and value.isdecimal() and int(value) > 0):
            raise ConfigError(f"{where}: {word!r} should give a whole number above 0")
        limits[key] = int(value)
    if not limits:
        raise ConfigError(f"{where}: it gives no limit")
    return Quota(**limits)
