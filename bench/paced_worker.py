"""`python -m bench.paced_worker`: a worker without a model, for measuring what lies above workers.

It answers plans at a set rate, and its tokens tell in which step they were made: token =
first_token + step % num_tokens. It prints a line when it has joined. When its standard input
closes, it prints the time at which each step's result was sent, as JSON, and ends.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time

from protos.quire.worker.v1 import worker_pb2
from shared.codec import PROTOCOL_VERSION, decode_plan, encode_result, parse_scheduler_message
from shared.plan import StepPlan, StepResult
from shared.transport import DealerLink

BLOCK_SIZE = 16
MAX_BATCHED_TOKENS = 8192


class PacedWorker:
    """One replica, played at `steps_per_s`."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._link = DealerLink(args.scheduler_endpoint)
        self._epoch = 0
        self._step = 0
        self._heartbeat_s = 0.5
        self._next_heartbeat_s = 0.0
        self.sent_s: dict[int, float] = {}
        """When each step's result was sent; CLOCK_MONOTONIC."""

    def run(self, is_over: threading.Event) -> None:
        """Works until told that it is over."""
        self._register()
        due_s = time.monotonic()
        while not is_over.is_set():
            plan = self._next_plan()
            if plan is None:
                continue
            due_s = max(due_s + 1 / self._args.steps_per_s, time.monotonic())
            time.sleep(max(0.0, due_s - time.monotonic()))
            self._answer(plan)
        self._link.close()

    def _register(self) -> None:
        args = self._args
        register = worker_pb2.Register(
            protocol_version=PROTOCOL_VERSION,
            worker_id=args.worker_id,
            incarnation=1,
            model_fingerprint=args.fingerprint,
            device="cpu",
            world_size=1,
        )
        self._send(worker_pb2.WorkerMessage(register=register))
        while True:
            frame = self._link.receive(1.0)
            if frame is None:
                continue
            message = parse_scheduler_message(frame)
            if message.HasField("refused"):
                raise SystemExit(f"the worker was refused: {message.refused.reason}")
            if message.HasField("welcome"):
                break
        self._epoch = message.epoch
        self._heartbeat_s = message.welcome.heartbeat_interval_ms / 1000
        ready = worker_pb2.Ready(
            num_device_blocks=args.num_blocks,
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            max_num_seqs=args.max_num_seqs,
            block_bytes=1024,
        )
        self._send(worker_pb2.WorkerMessage(ready=ready))
        print("joined", flush=True)

    def _next_plan(self) -> StepPlan | None:
        now = time.monotonic()
        if now >= self._next_heartbeat_s:
            self._next_heartbeat_s = now + self._heartbeat_s
            heartbeat = worker_pb2.WorkerHeartbeat(
                step_started=self._step, step_finished=self._step
            )
            self._send(worker_pb2.WorkerMessage(heartbeat=heartbeat))
        frame = self._link.receive(0.1)
        if frame is None:
            return None
        message = parse_scheduler_message(frame)
        return decode_plan(message.step_plan) if message.HasField("step_plan") else None

    def _answer(self, plan: StepPlan) -> None:
        assert plan.base_step == self._step, "a plan was lost"
        chunks = zip(plan.chunk_handles, plan.chunk_samples, strict=True)
        handles = [*plan.decode_handles, *(handle for handle, samples in chunks if samples)]
        token = self._args.first_token + plan.step % self._args.num_tokens
        result = StepResult(plan.step, handles, [token] * len(handles), execute_s=0.001)
        self._step = plan.step
        message = worker_pb2.WorkerMessage(step_result=encode_result(result))
        self.sent_s[plan.step] = time.monotonic()
        self._send(message)

    def _send(self, message: worker_pb2.WorkerMessage) -> None:
        message.epoch = self._epoch
        self._link.send(message.SerializeToString())


def main() -> None:
    """Works until standard input closes."""
    parser = argparse.ArgumentParser(prog="python -m bench.paced_worker", description=__doc__)
    parser.add_argument("--scheduler-endpoint", required=True)
    parser.add_argument("--fingerprint", required=True, help="of the scheduler's model")
    parser.add_argument("--worker-id", required=True)
    parser.add_argument("--steps-per-s", type=float, required=True)
    parser.add_argument("--max-num-seqs", type=int, required=True)
    parser.add_argument("--num-blocks", type=int, required=True, help="of 16 tokens")
    parser.add_argument("--first-token", type=int, required=True)
    parser.add_argument("--num-tokens", type=int, required=True)
    worker = PacedWorker(parser.parse_args())
    is_over = threading.Event()
    thread = threading.Thread(target=worker.run, args=(is_over,))
    thread.start()
    sys.stdin.read()
    is_over.set()
    thread.join()
    json.dump(worker.sent_s, sys.stdout)


if __name__ == "__main__":
    main()
