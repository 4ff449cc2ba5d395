"""Sampling defaults of a model folder: taken where they can be, refused by name where not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shared.errors import ModelLoadError
from shared.model_files import read_model_spec
from shared.sampling import NEUTRAL_DEFAULTS, SamplingDefaults
from tests.shared.test_model_files import write_folder


def folder_with(path: Path, **values: object) -> Path:
    folder = write_folder(path)
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def test_what_the_file_says_holds_and_the_rest_changes_nothing(tmp_path: Path) -> None:
    folder = folder_with(
        tmp_path / "m", temperature=0.6, top_p=0.9, top_k=None, do_sample=False, eos_token_id=7
    )
    spec = read_model_spec(folder)
    assert spec.sampling_defaults == SamplingDefaults(temperature=0.6, top_p=0.9)
    ignored = read_model_spec(folder, use_generation_config=False)
    assert ignored.sampling_defaults == NEUTRAL_DEFAULTS
    assert ignored.eos_token_ids == spec.eos_token_ids == (2, 7)
    assert ignored.fingerprint == spec.fingerprint


def test_without_the_file_nothing_is_changed(tmp_path: Path) -> None:
    assert read_model_spec(write_folder(tmp_path / "m")).sampling_defaults == NEUTRAL_DEFAULTS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", float("nan")),
        ("top_k", 1.5),
        ("top_k", -1),
        ("top_p", 0),
        ("top_p", True),
        ("min_p", 2),
        ("typical_p", 0.0),
        ("repetition_penalty", 0.0),
    ],
)
def test_a_value_that_no_request_could_have_is_refused(
    tmp_path: Path, name: str, value: object
) -> None:
    folder = folder_with(tmp_path / "m", **{name: value})
    with pytest.raises(ModelLoadError, match=rf"{name} .*--ignore-generation-config"):
        read_model_spec(folder)
    assert read_model_spec(folder, use_generation_config=False).sampling_defaults is not None
