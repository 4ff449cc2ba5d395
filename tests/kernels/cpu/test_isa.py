"""Each instruction set that this machine runs: its operations, and the whole step with it."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kernels.cpu import build
from kernels.cpu.build import ISA_FLAGS, detect_isa
from kernels.cpu.decoder import Compute
from tests.kernels.cpu.paged_run import PagedRun, make_decoder, random_tokens
from tests.kernels.cpu.tiny_model import HALVES, Shape, make_spec, make_weights

HERE = Path(__file__).parent
SOURCES = Path(__file__).parents[3] / "kernels" / "cpu"


TRAP_OVERFLOWS = ("-fsanitize=signed-integer-overflow", "-fsanitize-undefined-trap-on-error")
AVX2 = {"avx2", "fma", "f16c"}
AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
has_avx2 = pytest.mark.skipif(detect_isa() == "portable", reason="the machine has no AVX2")
has_simde = pytest.mark.skipif(
    not Path("/usr/include/simde/x86/avx512.h").exists(), reason="libsimde-dev is not installed"
)


def compile_and_run(source: str, flags: Sequence[str], folder: Path) -> str:
    """What the program of a source beside this file prints; it must end well."""
    program = folder / "program"
    common = ["-std=c++17", "-ffp-contract=off", "-pthread", f"-I{SOURCES}"]
    command = ["g++", *common, *flags, "-O0", str(HERE / source), "-o", str(program)]
    subprocess.run(command, check=True, timeout=120)
    done = subprocess.run([program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize("isa", sorted({"portable", detect_isa()}))
def test_vector_operations(isa: str, tmp_path: Path) -> None:
    flags = (*ISA_FLAGS[isa], *TRAP_OVERFLOWS)
    assert compile_and_run("simd_check.cpp", flags, tmp_path) == ""


@pytest.mark.parametrize("isa", sorted({"portable", detect_isa()}))
def test_rows_are_quantised(isa: str, tmp_path: Path) -> None:
    flags = (*ISA_FLAGS[isa], *TRAP_OVERFLOWS)
    assert compile_and_run("quantise_check.cpp", flags, tmp_path) == ""


@pytest.mark.parametrize("isa", sorted({"portable", detect_isa()}))
def test_the_likeliest_tokens_are_those_of_the_full_product(isa: str, tmp_path: Path) -> None:
    assert compile_and_run("likeliest_check.cpp", ISA_FLAGS[isa], tmp_path) == ""


def test_rows_of_every_step_have_their_chunks(tmp_path: Path) -> None:
    assert compile_and_run("chunks_check.cpp", ISA_FLAGS["portable"], tmp_path) == ""


@pytest.fixture(scope="module")
def avx2_products(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("avx2")
    return sorted(compile_and_run("product_check.cpp", ISA_FLAGS["avx2"], folder).splitlines())


@has_avx2
@has_simde
@pytest.mark.parametrize("isa", ["avx512", "avxvnni"])
def test_an_emulated_instruction_set(isa: str, avx2_products: list[str], tmp_path: Path) -> None:
    """Its vector operations are right, and its 8-bit products have the bits of AVX2's."""
    flags = (*ISA_FLAGS["avx2"], "-Wno-psabi", "-include", str(HERE / f"emulated_{isa}.h"))
    assert compile_and_run("simd_check.cpp", flags, tmp_path) == ""
    products = sorted(compile_and_run("product_check.cpp", flags, tmp_path).splitlines())
    assert len(products) == 16920
    assert products == avx2_products


@has_avx2
@pytest.mark.parametrize("isa", ["avx512", "avxvnni"])
def test_an_instruction_set_compiles(isa: str, tmp_path: Path) -> None:
    """To the instruction that adds four products, and to none that its machines may lack."""
    assembly = tmp_path / "assembly.s"
    flags = [*build._FLAGS, *ISA_FLAGS[isa], f"-I{SOURCES}"]
    command = ["g++", *flags, "-S", str(HERE / "product_check.cpp"), "-o", str(assembly)]
    subprocess.run(command, check=True, timeout=120)
    assert "vpdpbusd" in assembly.read_text()
    march = "+".join(["-march=generic64", *sorted(build._CPU_FLAGS[isa])])
    command = ["as", march, str(assembly), "-o", str(tmp_path / "object")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("flags", "sizes", "wanted"),
    [
        ({*AVX2, *AVX512, "avx512_vnni"}, (64, 16), "avx512"),
        ({*AVX2, *AVX512, "avx512_vnni", "avx_vnni"}, (64, 16), "avx512"),
        ({*AVX2, *AVX512, "avx512_vnni", "avx_vnni"}, (40, 16), "avxvnni"),
        ({*AVX2, "avx_vnni"}, (64, 16), "avxvnni"),
        ({*AVX2, *AVX512, "avx512_vnni"}, (40, 16), "avx2"),
        ({*AVX2, *AVX512}, (64, 16), "avx2"),
        ({*AVX2, *AVX512, "avx512_vnni"} - {"avx512dq"}, (64, 16), "avx2"),
        (AVX2, (20, 16), "avx2"),
        ({"avx2"}, (64, 16), "portable"),
    ],
)
def test_the_best_fitting_instruction_set_is_chosen(
    monkeypatch: pytest.MonkeyPatch, flags: set[str], sizes: tuple[int, ...], wanted: str
) -> None:
    monkeypatch.setattr(build, "_cpu_flags", lambda: flags)
    assert detect_isa(*sizes) == wanted


@has_avx2
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
        for isa in (detect_isa(spec.head_dim), "portable")
    )
    errors = (native - portable).pow(2).mean(1).sqrt() / native.pow(2).mean().sqrt()
    assert errors.median() < 1e-5
    assert errors.max() < (1e-4 if compute == "float32" else 0.1)
