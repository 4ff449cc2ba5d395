"""Every Triton kernel compiles to machine code for sm_80 and sm_90, within what those have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.tree import ROOT

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
"""The most shared memory that one program may ask for (CUDA programming guide, table 24)."""

KERNELS = {
    *("decode_kernel", "merge_kernel", "prefill_kernel", "write_kernel", "copy_kernel"),
    *("best_kernel", "draw_kernel", "gather_kernel", "draw_candidates_kernel"),
    *("rule_kernel", "mask_kernel"),
}
ATTENTION = {"decode_kernel", "prefill_kernel"}


@pytest.fixture(scope="module")
def cubins() -> list[dict[str, Any]]:
    """What `tests.kernels.cubins` reports, from processes in which nothing is interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.kernels.cubins", str(capability)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for capability in SHARED_BYTES
    ]
    reports = []
    for process in processes:
        output, errors = process.communicate()
        assert process.returncode == 0, errors
        reports += [json.loads(line) for line in output.splitlines()]
    return reports


@pytest.mark.timeout(300)  # compilers on a busy machine
def test_every_kernel_has_machine_code_for_both_capabilities(cubins: list[dict[str, Any]]) -> None:
    made = {(cubin["kernel"], cubin["capability"]) for cubin in cubins if cubin["cubin_bytes"] > 0}
    assert made == {(kernel, capability) for kernel in KERNELS for capability in SHARED_BYTES}


def test_two_decode_programs_fit_on_a_multiprocessor_and_one_of_all_others(
    cubins: list[dict[str, Any]],
) -> None:
    for cubin in cubins:
        limit = SHARED_BYTES[cubin["capability"]]
        # Decode is bound by memory and lives from company; prefill fills its program by itself.
        programs = 2 if cubin["kernel"] == "decode_kernel" else 1
        assert cubin["shared_bytes"] * programs <= limit, cubin


def test_attention_copies_ahead_and_multiplies_16_bit_types_on_tensor_cores(
    cubins: list[dict[str, Any]],
) -> None:
    for cubin in cubins:
        if cubin["kernel"] in ATTENTION:
            assert cubin["has_async_copy"], cubin
            assert cubin["has_tensor_core"] == ("fp32" not in cubin["shape"]), cubin


def test_rules_round_each_operation_as_the_cpu_does(cubins: list[dict[str, Any]]) -> None:
    rules = [cubin for cubin in cubins if cubin["kernel"] == "rule_kernel"]
    assert rules
    for cubin in rules:
        assert cubin["rounds_each_operation"], cubin
