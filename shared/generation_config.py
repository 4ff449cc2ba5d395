"""Sampling defaults of a model folder's generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shared.errors import ModelLoadError
from shared.sampling import SamplingDefaults

RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_k": (0, 2**31 - 1),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "typical_p": (0.0, 1.0),
    "repetition_penalty": (0.1, 10.0),
}
ABOVE_ZERO = ("top_p", "typical_p")


def sampling_defaults(path: Path, config: Mapping[str, object]) -> SamplingDefaults:
    """The defaults that the `config` at `path` sets; other keys, such as do_sample and
    max_new_tokens, are not looked at. Raises ModelLoadError for a value that no request could have.
    """
    found = {name: config[name] for name in RANGES if config.get(name) is not None}
    for name, value in found.items():
        lowest, highest = RANGES[name]
        kinds = int if name == "top_k" else int | float
        if (
            not isinstance(value, kinds)
            or isinstance(value, bool)
            or not lowest <= value <= highest
            or (name in ABOVE_ZERO and value == 0)
        ):
            raise ModelLoadError(
                f"{path}: {name} should be a number in [{lowest:g}, {highest:g}], is {value!r}; "
                "--ignore-generation-config does without the file's sampling defaults"
            )
    return SamplingDefaults(**found)  # type: ignore[arg-type]
