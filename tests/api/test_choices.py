"""Several choices of one prompt, as one client reads them."""

from __future__ import annotations

import grpc

from protos.quire.inference.v1 import inference_pb2
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.text.tokenizer import TextModel
from shared.model_spec import ModelSpec
from tests.api.fake_worker import continuation, joined, letter_after
from tests.api.serving import OpenStream, answer, error_of, opened, request, serving

Sampling = inference_pb2.SamplingParams


async def test_each_choice_streams_by_itself(spec: ModelSpec, text_model: TextModel) -> None:
    worker_plans = []
    async with serving(spec, text_model) as served:
        worker = served.worker()
        async with joined(worker):
            await served.wait_status(1)
            sampling = Sampling(n=3, first_choice=4, seed=9)
            got = await answer(served, request("hello", sampling=sampling))
            worker_plans += worker.plans
    assert (got.started.sampling.n, got.started.sampling.first_choice) == (3, 4)
    for index in range(3):
        own = [r for r in got.responses[1:] if r.sequence_index == index]
        token_ids: list[int] = []
        for response in own[:-1]:
            assert response.delta.offset == len(token_ids)
            token_ids += response.delta.token_ids
        assert token_ids == continuation(b"hello", 8, letter_after)
        assert own[-1].finished.usage.num_output_tokens == 8
    starts = [start for plan in worker_plans for start in plan.starts]
    assert [start.sequence_index for start in starts] == [4, 5, 6], "the key of the draws"
    assert {start.sampling.seed for start in starts} == {9}


async def test_a_request_of_four_counts_as_four(spec: ModelSpec, text_model: TextModel) -> None:
    """FIELD-FAILURES part 4: n=4 counts as 4, beside one that waits already."""
    core = SchedulerConfig(max_waiting=4, max_num_seqs=1)
    async with serving(spec, text_model, core=core) as served:
        worker = served.worker()
        async with joined(worker):
            await served.wait_status(1)
            worker.hold()
            await opened(served, request())
            OpenStream(served, request())
            await served.wait_live(2)
            error = await error_of(served.generation.Generate(request(sampling=Sampling(n=4))))
            three = OpenStream(served, request(sampling=Sampling(n=3)))
            await served.wait_live(3)
            worker.release()
            assert (await three.rest()).kinds[0] == "started"
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_cancel_of_four_choices_leaves_nothing(
    spec: ModelSpec, text_model: TextModel
) -> None:
    """FIELD-FAILURES part 2: cancel with n=4: idle in two steps."""
    async with serving(spec, text_model) as served, joined(served.worker()):
        await served.wait_status(1)
        stream = await opened(served, request(max_tokens=4000, sampling=Sampling(n=4)))
        await stream.read()
        stream.cancel()
        await served.wait_live(0)
        await served.wait_idle()
