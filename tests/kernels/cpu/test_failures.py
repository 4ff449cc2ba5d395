"""What cannot be computed is refused before anything is: indices, compilers, weight types."""

from __future__ import annotations

import logging
import stat
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels.cpu import build, load_decoder
from kernels.cpu.decoder import Compute, NativeDecoder
from kernels.cpu.library import load_library
from kernels.decoder import DecoderWeights, StoredMatrix
from kernels.interface import AttentionBatch
from tests.kernels.cpu.paged_run import PagedRun, make_decoder, random_tokens
from tests.kernels.cpu.tiny_model import Shape, make_spec, make_weights

SHAPE = Shape(hidden_size=32, intermediate_size=32, head_dim=32, num_layers=1)
SPEC = make_spec(SHAPE)


def tiny_weights(format: str = "F32") -> DecoderWeights:
    return make_weights(SHAPE, (format,), torch.Generator().manual_seed(4))


def load(weights: DecoderWeights) -> object:
    return load_decoder(
        SPEC,
        weights,
        compute="float32",
        kv_dtype=torch.float32,
        num_threads=1,
        max_num_tokens=8,
        block_size=16,
        progress=None,
    )


def bad_batches(good: AttentionBatch) -> dict[str, AttentionBatch]:
    return {
        "a slot": replace(good, slots=good.slots + 10_000),
        "negative slot": replace(good, slots=good.slots - 10_000),
        "block table": replace(good, block_tables=good.block_tables + 10_000),
        "too short": replace(good, block_tables=good.block_tables[:, :1]),
        "seq_lens": replace(good, seq_lens=torch.tensor([3], dtype=torch.int32)),
        "too long": replace(good, seq_lens=torch.tensor([2**31 - 1], dtype=torch.int32)),
        "query_start": replace(good, query_start=torch.tensor([0, 7], dtype=torch.int32)),
    }


@pytest.mark.parametrize(
    "name",
    ["a slot", "negative slot", "block table", "too short", "seq_lens", "too long", "query_start"],
)
def test_a_bad_batch_is_refused_and_the_next_step_is_right(name: str) -> None:
    decoder = make_decoder(SPEC, tiny_weights(), "float32")
    tokens = random_tokens(SPEC, [20])
    run = PagedRun(decoder, SPEC, "float32", tokens)
    before = run.kv_cache.clone()
    rows = torch.tensor([0])
    with pytest.raises(IndexError):
        decoder.forward(tokens[0], bad_batches(run.batch([20]))[name], run.kv_cache, rows)
    assert torch.equal(run.kv_cache.isnan(), before.isnan())
    assert run.step([20])[0].isfinite().all()


@pytest.mark.parametrize("token_id", [-1, SHAPE.vocab_size, 2**32 - 1])
def test_a_token_outside_the_vocabulary_is_refused(token_id: int) -> None:
    run = PagedRun(
        make_decoder(SPEC, tiny_weights(), "float32"),
        SPEC,
        "float32",
        [torch.tensor([1, token_id])],
    )
    with pytest.raises(IndexError, match="vocabulary"):
        run.step([2])


def test_a_step_over_the_limit_and_a_logit_row_outside_are_refused() -> None:
    decoder = make_decoder(SPEC, tiny_weights(), "float32")
    tokens = random_tokens(SPEC, [2049])
    run = PagedRun(decoder, SPEC, "float32", tokens)
    with pytest.raises(IndexError, match="max_num_tokens"):
        run.step([2049])
    with pytest.raises(IndexError, match="logit row"):
        decoder.forward(tokens[0][:4], run.batch([4]), run.kv_cache, torch.tensor([4]))


def test_a_step_without_logit_rows_only_fills_the_cache() -> None:
    decoder = make_decoder(SPEC, tiny_weights(), "float32")
    tokens = random_tokens(SPEC, [4])
    run = PagedRun(decoder, SPEC, "float32", tokens)
    rows = torch.empty(0, dtype=torch.int64)
    logits = decoder.forward(tokens[0], run.batch([4]), run.kv_cache, rows).logits
    assert logits.shape == (0, SPEC.vocab_size)
    assert not run.kv_cache.isnan().all()


@pytest.mark.parametrize("half", ["scale", "minimum"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_refused(poison: float, half: str) -> None:
    weights = tiny_weights("Q4_1")
    offset = {"scale": 0, "minimum": 2}[half]
    last_block = weights.layers[-1].down.data[-1, -20:]
    last_block[offset : offset + 2] = torch.tensor([poison]).half().view(torch.uint8)
    with pytest.raises(ValueError, match="not finite"):
        make_decoder(SPEC, weights, "auto")


def test_weights_whose_scale_is_zero_are_their_minimum() -> None:
    """Beside large activations, whose scales are added to exponents."""
    weights = tiny_weights("Q4_1")
    for layer in weights.layers:
        for matrix in (layer.query, layer.gate, layer.down):
            matrix.data.unflatten(1, (-1, 20))[:, :, :2] = 0
    tokens = random_tokens(SPEC, [6])
    logits = PagedRun(make_decoder(SPEC, weights, "auto"), SPEC, "auto", tokens).step([6])[0]
    exact = PagedRun(make_decoder(SPEC, weights, "float32"), SPEC, "float32", tokens).step([6])[0]
    assert (logits - exact).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("compute", ["auto", "float32"])
def test_a_poisoned_row_gives_nan_and_its_neighbours_are_right(
    compute: Compute, poison: float
) -> None:
    """One bad activation of one sequence, found among three; the others keep their bits."""
    shape = replace(SHAPE, tied=False)
    spec = make_spec(shape)

    def logits_of(value: float | None) -> torch.Tensor:
        weights = make_weights(shape, ("Q4_1",), torch.Generator().manual_seed(4))
        weights = replace(weights, embedding=StoredMatrix(53, 32, "F32", torch.rand(53, 32)))
        if value is not None:
            weights.embedding.data[7, 20] = value
        tokens = [torch.tensor(t) for t in ([1, 2], [7, 3], [5, 6])]
        decoder = make_decoder(spec, weights, compute)
        return torch.cat(PagedRun(decoder, spec, compute, tokens).step([1, 1, 1]))

    torch.manual_seed(0)
    sound = logits_of(None)
    torch.manual_seed(0)
    poisoned = logits_of(poison)
    assert sound.isfinite().all()
    assert poisoned[1].isnan().all()
    assert torch.equal(poisoned[[0, 2]], sound[[0, 2]])


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, -1])
def test_what_follows_a_nan_of_any_bits_is_nan(bits: int, kv_dtype: torch.dtype) -> None:
    """The cache keeps it."""
    shape = replace(SHAPE, tied=False)
    spec = make_spec(shape)
    embedding = torch.rand(53, 32)
    embedding.view(torch.int32)[7] = bits
    weights = make_weights(shape, ("F32",), torch.Generator().manual_seed(4))
    weights = replace(weights, embedding=StoredMatrix(53, 32, "F32", embedding))
    decoder = make_decoder(spec, weights, "auto", kv_dtype=kv_dtype)
    run = PagedRun(decoder, spec, "auto", [torch.tensor([7, 3])], kv_dtype=kv_dtype)
    run.step([1])
    assert run.step([1])[0].isnan().all()


@pytest.mark.parametrize("source", ["pool_check.cpp", "pool_phases.cpp"])
def test_a_pool_works_on_each_item_once(tmp_path: Path, source: str) -> None:
    """With fewer threads than wanted, and in many short phases."""
    run_check(tmp_path, source)


def test_a_step_after_one_that_found_no_memory_has_its_room(tmp_path: Path) -> None:
    run_check(tmp_path, "plan_check.cpp")


def run_check(tmp_path: Path, source: str) -> None:
    """Builds and runs a program that says nothing where all is well."""
    program = tmp_path / "check"
    command = ["g++", "-std=c++17", "-O1", "-pthread", f"-I{Path(build.__file__).parent}"]
    command += [str(Path(__file__).with_name(source)), "-o", str(program), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    done = subprocess.run([program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_fewer_threads_than_wanted_are_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library = load_library(build.find_or_build(build.detect_isa()))
    monkeypatch.setattr(library, "quire_num_threads", lambda handle: 1)
    with caplog.at_level(logging.WARNING):
        NativeDecoder(
            library,
            SPEC,
            tiny_weights(),
            compute="float32",
            kv_dtype=torch.float32,
            num_threads=4,
            max_num_tokens=8,
        )
    assert "only 1 of 4 threads" in caplog.text


def test_an_unknown_weight_type_gives_no_decoder(caplog: pytest.LogCaptureFixture) -> None:
    unknown = StoredMatrix(53, 32, "IQ4_XS", torch.zeros(53, 17, dtype=torch.uint8))
    with caplog.at_level(logging.WARNING):
        assert load(replace(tiny_weights(), embedding=unknown)) is None
    assert [r.getMessage() for r in caplog.records] == [
        "no native CPU decoder for weights of type IQ4_XS"
    ]


def test_without_a_compiler_there_is_no_decoder(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(build, "_folders", lambda: (tmp_path,))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.WARNING):
        assert load(tiny_weights()) is None
    assert len(caplog.records) == 1
    assert "no C++ compiler" in caplog.text


def fake_compiler(folder: Path, body: str) -> Path:
    """A compiler that notes each compilation in `folder`/calls."""
    path = folder / "fake-c++"
    path.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then echo fake 1.0; exit 0; fi\n'
        f"echo call >> {folder}/calls\n{body}\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_two_builds_at_once_compile_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = 'for last; do :; done\nsleep 0.2\necho library > "$last"'
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, script)))
    monkeypatch.setattr(build, "_folders", lambda: (tmp_path / "build",))
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(build.find_or_build("portable")))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and found[0] == found[1]
    assert found[0].read_text() == "library\n"
    assert (tmp_path / "calls").read_text().count("call") == 1


def test_an_earlier_build_serves_where_there_is_no_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build, "_folders", lambda: (tmp_path / "build",))
    script = 'for last; do :; done\necho library > "$last"'
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, script)))
    built = build.find_or_build("portable")
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", "")
    assert build.find_or_build("portable") == built


def test_a_failing_compiler_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = fake_compiler(tmp_path, 'echo "decoder.cpp:1: error: no such luck" >&2\nexit 1')
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(build, "_folders", lambda: (tmp_path / "build",))
    with pytest.raises(build.BuildError, match="no such luck"):
        build.find_or_build("portable")


def test_a_compiler_that_does_not_know_avx_vnni_builds_for_avx2(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """And that build is found where there is no compiler."""
    monkeypatch.setattr(build, "_folders", lambda: (tmp_path / "build",))
    script = (
        'case "$*" in *-mavxvnni*) echo "error: unknown -mavxvnni" >&2; exit 1;; esac\n'
        'for last; do :; done\necho library > "$last"'
    )
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, script)))
    with caplog.at_level(logging.WARNING):
        built = build.find_or_build("avxvnni")
    assert [r.getMessage().rpartition(": ")[2] for r in caplog.records] == ["unknown -mavxvnni"]
    assert built == build.find_or_build("avx2")
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", "")
    assert build.find_or_build("avxvnni") == built
