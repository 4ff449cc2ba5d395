"""Compiles the native decoder, once per source text, instruction set and compiler.

The library lands beside the sources, or under ~/.cache/quire when the package is read-only. Two
processes that start at once share one build: a lock lets the second wait, and the finished file
appears in one rename. Where no compiler is installed (a slim image), a library built earlier from
the same sources is used.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

_AVX2 = ("-O3", "-mavx2", "-mfma", "-mf16c")
ISA_FLAGS = {
    "avx512": (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"),
    "avxvnni": (*_AVX2, "-mavxvnni"),
    "avx2": _AVX2,
    "portable": ("-O2",),
}
"""Compiler flags of each instruction set that the sources have a header for, the best first."""

NUM_LANES = {"avx512": 16, "avxvnni": 8, "avx2": 8, "portable": 4}
"""`kLanes` of each; the size of a head and of a block must be a multiple of it."""

_AVX2_CPU = {"avx2", "fma", "f16c"}
_CPU_FLAGS = {
    "avx512": {*_AVX2_CPU, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"},
    "avxvnni": {*_AVX2_CPU, "avx_vnni"},
    "avx2": _AVX2_CPU,
}
"""What /proc/cpuinfo must name. DQ: GCC 12 puts in some of its instructions unasked."""

_FALLBACKS = {"avxvnni": "avx2"}
"""What serves where the compiler does not know an instruction set (AVX-VNNI: GCC before 11)."""

_FLAGS = ("-std=c++17", "-ffp-contract=off", "-shared", "-fPIC", "-pthread")
_SOURCES = Path(__file__).parent
_BUILD_TIMEOUT_S = 600


class BuildError(Exception):
    """The library can be neither found nor built; the message says why."""


def detect_isa(*sizes: int) -> str:
    """The best instruction set of `ISA_FLAGS` that this machine runs and whose lanes divide all of
    `sizes`; the best of all if none does."""
    runnable = [isa for isa, needed in _CPU_FLAGS.items() if needed <= _cpu_flags()]
    fitting = [isa for isa in runnable if not any(size % NUM_LANES[isa] for size in sizes)]
    return (fitting or runnable or ["portable"])[0]


def _cpu_flags() -> set[str]:
    try:
        cpu = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return set()
    flags = next((line for line in cpu.splitlines() if line.startswith("flags")), "")
    return set(flags.split())


def find_or_build(isa: str) -> Path:
    """The path of the library for `isa`; builds it if there is none yet.

    Where that fails, of the library for its fallback, with a warning. Raises BuildError without a
    compiler and an earlier build, or when the compiler fails.
    """
    try:
        return _find_or_build(isa)
    except BuildError as error:
        if isa not in _FALLBACKS:
            raise
        path = _find_or_build(_FALLBACKS[isa])
        logger.warning("using the %s build, as %s has none: %s", _FALLBACKS[isa], isa, error)
        return path


def _find_or_build(isa: str) -> Path:
    sources = _hash_of_sources(isa)
    compiler = _find_compiler()
    if compiler is None:
        for folder in _folders():
            for path in sorted(folder.glob(f"quire-cpu-{isa}-{sources}-*.so")):
                return path
        raise BuildError("no C++ compiler found (looked for $CXX, g++ and c++)")
    name = f"quire-cpu-{isa}-{sources}-{_compiler_version(compiler)}.so"
    for folder in _folders():
        if (folder / name).exists():
            return folder / name
    folder = _writable_folder()
    with _lock(folder / "build.lock"):
        if not (folder / name).exists():
            _compile(compiler, isa, folder / name)
    return folder / name


def _compile(compiler: str, isa: str, target: Path) -> None:
    logger.info("building the native CPU decoder for %s (once, some 20 seconds)", isa)
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        output = Path(scratch) / target.name
        command = [compiler, *_FLAGS, *ISA_FLAGS[isa], str(_SOURCES / "decoder.cpp")]
        command += ["-o", str(output)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildError(f"{compiler} did not finish: {error}") from error
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines()
            cause = next((line for line in lines if "error" in line), "no message")
            raise BuildError(f"{compiler} failed with code {done.returncode}: {cause}")
        os.replace(output, target)
    logger.info("built %s in %.0f s", target, time.monotonic() - start_s)


def _hash_of_sources(isa: str) -> str:
    digest = hashlib.blake2b(digest_size=8)
    digest.update(repr((_FLAGS, ISA_FLAGS[isa], platform.machine())).encode())
    for path in sorted([*_SOURCES.glob("*.h"), *_SOURCES.glob("*.cpp")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _find_compiler() -> str | None:
    for name in (os.environ.get("CXX"), "g++", "c++"):
        if name and (path := shutil.which(name)):
            return path
    return None


def _compiler_version(compiler: str) -> str:
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{compiler} --version failed: {error}") from error
    return hashlib.blake2b(done.stdout, digest_size=4).hexdigest()


def _folders() -> tuple[Path, ...]:
    return _SOURCES / "build", Path.home() / ".cache" / "quire" / "kernels"


def _writable_folder() -> Path:
    for folder in _folders():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    raise BuildError(f"none of {', '.join(map(str, _folders()))} can be written to")


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
