"""Each instruction set that this machine runs: its operations, and the whole step with it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from kernels.cpu.build import ISA_FLAGS, detect_isa
from kernels.cpu.decoder import Compute
from tests.kernels.cpu.paged_run import PagedRun, make_decoder, random_tokens
from tests.kernels.cpu.tiny_model import HALVES, Shape, make_spec, make_weights

SOURCES = Path(__file__).parents[3] / "kernels" / "cpu"


@pytest.mark.parametrize("isa", sorted({"portable", detect_isa()}))
def test_vector_operations(isa: str, tmp_path: Path) -> None:
    program = tmp_path / "simd_check"
    source = Path(__file__).with_name("simd_check.cpp")
    flags = ["-std=c++17", "-ffp-contract=off", *ISA_FLAGS[isa], f"-I{SOURCES}"]
    subprocess.run(["g++", *flags, str(source), "-o", str(program)], check=True, timeout=60)
    done = subprocess.run([program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.skipif(detect_isa() == "portable", reason="nothing to compare with")
@pytest.mark.parametrize("compute", ["float32", "auto"])
def test_the_portable_path_is_close_to_this_machines(compute: Compute) -> None:
    """They differ in fused multiply-adds alone; in 8 bits a rounding may fall otherwise."""
    shape = Shape(num_layers=1)
    spec = make_spec(shape)
    weights = make_weights(shape, tuple(HALVES), torch.Generator().manual_seed(5))
    sequences = random_tokens(spec, [9, 4])
    native, portable = (
        torch.cat(
            PagedRun(
                make_decoder(spec, weights, compute, isa=isa), spec, compute, sequences
            ).finish(chunk=5)
        )
        for isa in (detect_isa(), "portable")
    )
    errors = (native - portable).pow(2).mean(1).sqrt() / native.pow(2).mean().sqrt()
    assert errors.median() < 1e-5
    assert errors.max() < (1e-4 if compute == "float32" else 0.1)
