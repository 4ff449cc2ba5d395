"""How the workers of a server that starts get on, by the operator's API."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

import grpc
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from protos.quire.admin.v1 import admin_pb2, admin_pb2_grpc

POLL_S = 0.05
ADMIN_TIMEOUT_S = 2.0


def wait_until_ready(
    address: str, num_workers: int, goes_on: Callable[[], bool], console: Console
) -> bool:
    """Shows how much of the weights is there until so many workers are ready at the operator's
    `address`; False once `goes_on`, which is asked all the time, is False."""
    columns = (TextColumn("loading"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with (
        grpc.insecure_channel(address) as channel,
        Progress(*columns, console=console, transient=True) as progress,
    ):
        task = progress.add_task("loading", total=float(num_workers))
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        while goes_on():
            workers = _list_workers(stub)
            ready = [worker.state == admin_pb2.WORKER_STATE_READY for worker in workers]
            if sum(ready) >= num_workers:
                return True
            loaded = [
                1.0 if is_ready else worker.load_fraction
                for worker, is_ready in zip(workers, ready, strict=True)
            ]
            progress.update(task, completed=sum(loaded))
            time.sleep(POLL_S)
    return False


def _list_workers(stub: admin_pb2_grpc.AdminServiceStub) -> Sequence[admin_pb2.Worker]:
    """None yet while the scheduler starts."""
    with contextlib.suppress(grpc.RpcError):
        response: admin_pb2.ListWorkersResponse = stub.ListWorkers(
            admin_pb2.ListWorkersRequest(), timeout=ADMIN_TIMEOUT_S
        )
        return response.workers
    return ()
