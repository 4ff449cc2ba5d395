"""OpenVINO GenAI's continuous batching as a process; runs in the peers' venv, not in Quire's.

    python -m bench.peers.openvino_child MODEL.gguf THREADS MAX_NUM_SEQS CACHE_GIB

Standard input takes one JSON line for each request: {"id", "prompt", "max_tokens"}. Standard output
gives {"ready": true}, then a line for each step: {"at_s", "tokens": {id: how many}, "ended":
{id: prompt tokens}}; `at_s` is the system's monotonic clock, which the reader shares, taken here,
so that the pipe adds nothing to the figures.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO, TypedDict

import openvino_genai


class Request(TypedDict):
    id: int
    prompt: str
    max_tokens: int


class Server:
    """One pipeline, and a handle for each request that runs in it."""

    def __init__(self, model: Path, threads: int, max_num_seqs: int, cache_gib: int) -> None:
        config = openvino_genai.SchedulerConfig()
        config.max_num_seqs = max_num_seqs
        config.cache_size = cache_gib
        config.dynamic_split_fuse = True
        config.enable_prefix_caching = True
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(model), config, "CPU", {"INFERENCE_NUM_THREADS": threads}
        )
        self._tokenizer = self._pipeline.get_tokenizer()
        self._handles: dict[int, Any] = {}
        self._num_prompt_tokens: dict[int, int] = {}

    @property
    def is_idle(self) -> bool:
        return not self._handles

    def add(self, request: Request) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = request["max_tokens"]
        config.ignore_eos = True
        config.do_sample = False
        ids = self._tokenizer.encode(request["prompt"]).input_ids
        self._num_prompt_tokens[request["id"]] = int(ids.shape[1])
        self._handles[request["id"]] = self._pipeline.add_request(request["id"], ids, config)

    def step(self) -> dict[str, object]:
        """Computes one step and tells what came of it."""
        self._pipeline.step()
        at_s = time.perf_counter()
        tokens: dict[int, int] = {}
        ended: dict[int, int] = {}
        for key, handle in list(self._handles.items()):
            count = 0
            while handle.can_read():
                count += sum(len(output.generated_ids) for output in handle.read().values())
            if count:
                tokens[key] = count
            if handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                del self._handles[key]
                ended[key] = self._num_prompt_tokens.pop(key)
        return {"at_s": at_s, "tokens": tokens, "ended": ended}


def main() -> None:
    events = _own_stdout()
    model, *sizes = sys.argv[1:]
    threads, max_num_seqs, cache_gib = map(int, sizes)
    server = Server(Path(model), threads, max_num_seqs, cache_gib)
    inbox: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(inbox,), daemon=True).start()
    print(json.dumps({"ready": True}), file=events, flush=True)
    while True:
        while server.is_idle or not inbox.empty():
            request = inbox.get()
            if request is None:
                return
            server.add(request)
        print(json.dumps(server.step()), file=events, flush=True)


def _read(inbox: queue.SimpleQueue[Request | None]) -> None:
    for line in sys.stdin:
        inbox.put(json.loads(line))
    inbox.put(None)


def _own_stdout() -> TextIO:
    """Standard output for the events alone; what libraries print goes to standard error."""
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return events


if __name__ == "__main__":
    main()
