"""A worker at the process border: real frames over a real socket, tokens by a plain function.

It keeps the state that plans describe and checks them as it goes; `errors` must stay empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

import zmq
import zmq.asyncio

from protos.quire.worker.v1 import worker_pb2
from shared.codec import PROTOCOL_VERSION, decode_plan, encode_result
from shared.logprobs import Logprobs
from shared.plan import Candidates, SequenceFailure, SequenceStart, StepPlan, StepResult
from tests.api.tiny_model import VOCAB_SIZE
from tests.masks import ids_of
from tests.told import rows_of, told_of

NextToken = Callable[[Sequence[int]], int]


def letter_after(token_ids: Sequence[int]) -> int:
    """The token that follows a prefix: a lower-case letter."""
    return 97 + zlib.crc32(repr(list(token_ids)).encode()) % 26


def continuation(prompt: Sequence[int], num_tokens: int, next_token: NextToken) -> list[int]:
    """What a worker answers to a prompt, computed at once."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


@dataclass(slots=True)
class _State:
    start: SequenceStart
    token_ids: list[int]
    num_computed: int
    num_blocks: int
    num_candidates: int

    def told_places(self, num_tokens: int) -> range:
        """Places of the prompt that computing so many tokens tells of."""
        if self.start.num_prompt_logprobs is None:
            return range(0)
        end = min(self.num_computed + num_tokens + 1, self.start.num_prompt_tokens)
        return range(max(self.num_computed + 1, self.start.first_prompt_logprob), end)


@dataclass
class FakeWorker:
    """Connect it with `join`; a test then holds, mutes, kills or makes it lie."""

    endpoint: str
    fingerprint: str
    worker_id: str = "worker-0"
    incarnation: int = 1
    num_blocks: int = 64
    block_size: int = 16
    next_token: NextToken = letter_after
    fail_when: Callable[[Sequence[int]], bool] = lambda _: False
    """A sequence of these tokens fails by itself."""
    num_host_blocks: int = 0
    hold_after: Callable[[StepPlan], bool] = lambda _: False
    """Once it has answered such a plan it holds, until `release`."""
    obeys_masks: bool = True
    """A token that its mask has not is replaced by one that it has."""
    errors: list[str] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)
    epoch: int = 0
    refusal: str | None = None

    def __post_init__(self) -> None:
        self._context = zmq.asyncio.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, b"f" + secrets.token_bytes(8))
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.connect(self.endpoint)
        self._states: dict[int, _State] = {}
        self._step = 0
        self._may_step = asyncio.Event()
        self._may_step.set()
        self.held = asyncio.Event()
        """Set while it holds."""
        self._is_mute = False
        self._interval_s = 0.1
        self._tasks: list[asyncio.Task[None]] = []
        self.left = asyncio.Event()
        """Set when the worker was refused or drained."""

    # -- what a test does with it -------------------------------------------------------------

    async def join(self) -> None:
        """Registers, gets the epoch, reports ready, and works until killed."""
        await self.register()
        await self.send(worker_pb2.WorkerMessage(ready=self.ready_message()))
        self._tasks += [
            asyncio.create_task(self._work()),
            asyncio.create_task(self._send_heartbeats()),
        ]

    async def register(self, **changes: object) -> None:
        """Sends Register and takes the answer: Welcome or Refused. It works no more meanwhile, as
        the answer would be lost on whoever else reads."""
        await self._stop_work()
        register = worker_pb2.Register(
            protocol_version=PROTOCOL_VERSION,
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            model_fingerprint=self.fingerprint,
            device="cpu",
            world_size=1,
        )
        for name, value in changes.items():
            setattr(register, name, value)
        await self.send(worker_pb2.WorkerMessage(register=register))
        answer = await self.receive()
        while answer.WhichOneof("body") not in ("welcome", "refused"):
            answer = await self.receive()
        if answer.HasField("refused"):
            self.refusal = answer.refused.reason
            return
        self.epoch = answer.epoch
        self._step = 0
        self._states.clear()
        self._interval_s = answer.welcome.heartbeat_interval_ms / 1000

    def ready_message(self) -> worker_pb2.Ready:
        return worker_pb2.Ready(
            num_device_blocks=self.num_blocks,
            num_host_blocks=self.num_host_blocks,
            block_size=self.block_size,
            max_num_batched_tokens=512,
            max_num_seqs=32,
            block_bytes=1024,
        )

    def hold(self) -> None:
        """Plans are taken and not answered until `release`."""
        self._may_step.clear()
        self.held.set()

    def release(self) -> None:
        self._may_step.set()
        self.held.clear()

    def mute(self) -> None:
        """No heartbeat and no answer any more, as a stopped process."""
        self._is_mute = True
        self.hold()

    def forget(self) -> None:
        """Loses its place in the order of steps, so that the next plan does not fit."""
        self._step -= 1

    async def kill(self) -> None:
        """Gone without a word."""
        await self._stop_work()
        self._context.destroy(linger=0)

    async def send(self, message: worker_pb2.WorkerMessage) -> None:
        message.epoch = self.epoch
        await self.send_raw(message.SerializeToString())

    async def send_raw(self, frame: bytes) -> None:
        await self._socket.send(frame)

    async def receive(self) -> worker_pb2.SchedulerMessage:
        return worker_pb2.SchedulerMessage.FromString(await self._socket.recv())

    # -- work -----------------------------------------------------------------------------------

    async def _stop_work(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _send_heartbeats(self) -> None:
        while not self._is_mute:
            heartbeat = worker_pb2.WorkerHeartbeat(
                step_started=self._step, step_finished=self._step
            )
            await self.send(worker_pb2.WorkerMessage(heartbeat=heartbeat))
            await asyncio.sleep(self._interval_s)

    async def _work(self) -> None:
        while True:
            message = await self.receive()
            if self._is_mute:
                continue
            body = message.WhichOneof("body")
            if body == "step_plan" and message.epoch == self.epoch:
                await self._may_step.wait()
                await self._answer(decode_plan(message.step_plan))
            elif body == "drain":
                await self.send(worker_pb2.WorkerMessage(drain_done=worker_pb2.DrainDone()))
                self.left.set()

    async def _answer(self, plan: StepPlan) -> None:
        if plan.base_step != self._step:
            mismatch = worker_pb2.NeedFullState(at_step=self._step, got_base_step=plan.base_step)
            await self.send(worker_pb2.WorkerMessage(need_full_state=mismatch))
            return
        self.plans.append(plan)
        try:
            result = self._execute(plan)
        except (AssertionError, KeyError) as error:
            self.errors.append(f"step {plan.step}: {error!r}")
            raise
        self._step = plan.step
        if self.hold_after(plan):
            self.hold()
        await self.send(worker_pb2.WorkerMessage(step_result=encode_result(result)))

    def _execute(self, plan: StepPlan) -> StepResult:
        if plan.reset:
            self._states.clear()
        for handle in plan.finished_handles:
            self._states.pop(handle, None)
        for start in plan.starts:
            self._start(start)
        for fork in plan.forks:
            source = self._states[fork.source]
            num_blocks = source.num_computed // self.block_size + 1
            copy = replace(source, token_ids=list(source.token_ids), num_blocks=num_blocks)
            self._states[fork.handle] = copy
        for handle, token in zip(plan.chosen_handles, plan.chosen_token_ids, strict=True):
            self._states[handle].token_ids.append(token)
        for handle in plan.append_handles:
            self._states[handle].num_blocks += 1
        masks = dict(zip(plan.masked_handles, plan.masks, strict=True))
        handles: list[int] = []
        token_ids: list[int] = []
        failures: list[SequenceFailure] = []
        candidates: list[Candidates] = []
        told: dict[int, Logprobs] = {}
        told_prompts: dict[int, Logprobs] = {}
        rows = [(handle, 1, True) for handle in plan.decode_handles]
        rows += zip(plan.chunk_handles, plan.chunk_num_tokens, plan.chunk_samples, strict=True)
        for handle, num_tokens, samples in rows:
            state = self._states[handle]
            if self.fail_when(state.token_ids):
                # Also in the plan that was on its way when the first failure was told.
                failures.append(SequenceFailure(handle, "made to fail"))
                continue
            if places := state.told_places(num_tokens):
                num_top = state.start.num_prompt_logprobs or 0
                told_prompts[handle] = told_of(state.token_ids, places, num_top)
            state.num_computed += num_tokens
            assert state.num_computed <= len(state.token_ids), "more computed than known"
            assert state.num_computed <= state.num_blocks * self.block_size, "beyond its blocks"
            assert samples == (state.num_computed == len(state.token_ids)), "samples wrongly"
            if samples and state.num_candidates:
                candidates.append(self._candidates(handle, state))
            elif samples:
                token = self.next_token(state.token_ids)
                if handle in masks and self.obeys_masks:
                    allowed = ids_of(masks[handle])
                    token = token if token in allowed else allowed[token % len(allowed)]
                state.token_ids.append(token)
                handles.append(handle)
                token_ids.append(token)
                if (num_asked := state.start.sampling.num_logprobs) is not None:
                    last = len(state.token_ids) - 1
                    told[handle] = told_of(state.token_ids, range(last, last + 1), num_asked)
        return StepResult(
            plan.step,
            handles,
            token_ids,
            failures,
            0.001,
            candidates,
            rows_of(told),
            rows_of(told_prompts),
        )

    def _candidates(self, handle: int, state: _State) -> Candidates:
        """The next token is certain; after it come the other letters, ever less likely."""
        token = self.next_token(state.token_ids)
        ranked = [token, *(other for other in range(97, 123) if other != token)]
        ranked += [other for other in range(VOCAB_SIZE) if other not in ranked]
        del ranked[state.num_candidates :]
        return Candidates(handle, ranked, [-float(rank) for rank in range(len(ranked))])

    def _start(self, start: SequenceStart) -> None:
        self._states[start.handle] = _State(
            start,
            list(start.token_ids),
            start.num_computed_tokens,
            len(start.block_table),
            start.num_candidates,
        )


@contextlib.asynccontextmanager
async def joined(*workers: FakeWorker) -> AsyncIterator[None]:
    """The workers, at work; killed at the end, when none may have seen a plan that broke rules."""
    try:
        for worker in workers:
            await worker.join()
        yield
    finally:
        for worker in workers:
            await worker.kill()
    for worker in workers:
        assert not worker.errors, worker.errors
