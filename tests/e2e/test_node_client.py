"""A client in Node, straight from the .proto file, streams and cancels."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from protos.quire.inference.v1 import inference_pb2
from tests.e2e.cluster import PATIENCE_S, Cluster, eventually
from tests.tree import ROOT

PROTO = ROOT / "protos/quire/inference/v1/inference.proto"
SOURCES = ("client.js", "package.json", "package-lock.json")


@pytest.fixture(scope="session")
def node_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("Node isn't installed; it is an optional tool of this test alone")
    folder = tmp_path_factory.mktemp("node")
    for name in SOURCES:
        shutil.copy(ROOT / "examples/node" / name, folder)
    install = ("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline")
    installed = subprocess.run(install, cwd=folder, capture_output=True, text=True, check=False)
    if installed.returncode != 0:
        pytest.skip(f"npm ci failed, so no package registry can be reached: {installed.stderr}")
    return folder


def _run(folder: Path, cluster: Cluster, *arguments: str) -> dict[str, Any]:
    ended = subprocess.run(
        ["node", "client.js", cluster.address, str(PROTO), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    result: dict[str, Any] = json.loads(ended.stdout)
    return result


def test_node_streams_the_same_tokens_as_python(node_folder: Path, plain: Cluster) -> None:
    prompt = "The capital of France is"
    result = _run(node_folder, plain, prompt, "12")
    request = inference_pb2.GenerateRequest(
        text=prompt,
        sampling=inference_pb2.SamplingParams(temperature=0.0),
        stopping=inference_pb2.StoppingParams(max_tokens=12, ignore_eos=True),
    )
    answer = plain.generate(request)
    assert result == {
        "started": True,
        "token_ids": answer.token_ids,
        "text": answer.text,
        "reason": "FINISH_REASON_MAX_TOKENS",
        "status": "OK",
    }


def test_node_cancels_and_the_blocks_are_free(node_folder: Path, plain: Cluster) -> None:
    result = _run(node_folder, plain, "Once upon a time", "4096", "3")
    assert result["status"] == "CANCELLED" and result["reason"] is None
    assert len(result["token_ids"]) < 64
    eventually(plain.is_idle, PATIENCE_S, "no sequence and no block is held", plain.tail)
