"""`python -m scheduler_svc`: runs the scheduler until SIGTERM or SIGINT.

Exit codes: 0 after a graceful stop, 1 after a defect, 2 when flags, files or ports are wrong.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Sequence

import uvloop

from scheduler_svc.config import SchedulerServiceConfig, parse_config
from scheduler_svc.server import SchedulerServer
from scheduler_svc.servicers.errors import DeparturesFilter
from scheduler_svc.text.tokenizer import TextModel
from shared import logs
from shared.errors import QuireError
from shared.model_files import read_model_spec
from shared.model_spec import ModelSpec

log = logging.getLogger(__name__)

GC_THRESHOLDS = 20_000, 20, 20
"""Of the cyclic garbage collector, whose defaults would run it some hundred times a second under
load; what messages leave behind is freed by reference counts."""


async def serve(config: SchedulerServiceConfig, spec: ModelSpec, text_model: TextModel) -> None:
    """Serves until a signal, then stops gracefully; a second signal cuts the grace short."""
    server = SchedulerServer(config, spec, text_model)
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    try:
        await server.start()
    except QuireError:
        await server.close()
        raise
    log.info(
        "quire scheduler ready: %s on %s, admin on %s, workers on %s",
        spec.name,
        server.address,
        server.admin_address,
        server.worker_endpoint,
    )
    defect = asyncio.create_task(server.wait_defect())
    first = asyncio.create_task(signals.get())
    await asyncio.wait((defect, first), return_when=asyncio.FIRST_COMPLETED)
    if defect.done():
        first.cancel()
        await server.close()
        await defect
    log.info("%s: stopping, open streams have %g s", first.result().name, config.shutdown_grace_s)
    stopping = asyncio.create_task(server.stop(config.shutdown_grace_s))
    second = asyncio.create_task(signals.get())
    await asyncio.wait((stopping, second), return_when=asyncio.FIRST_COMPLETED)
    if not stopping.done():
        stopping.cancel()
        await asyncio.gather(stopping, return_exceptions=True)
        await server.close(send_workers_off=True)
    second.cancel()
    defect.cancel()
    log.info("quire scheduler stopped")


def main(argv: Sequence[str]) -> int:
    """Runs the process; gives its exit code."""
    try:
        config = parse_config(argv, os.environ)
        logs.setup(config.log_level, config.log_format, "scheduler")
        logging.getLogger("grpc._cython.cygrpc").addFilter(DeparturesFilter())
        spec = read_model_spec(
            config.model_path,
            config.model_name,
            use_generation_config=config.use_generation_config,
        )
        text_model = TextModel.load(spec)
        # The vocabulary and the modules stay for good: no collection need look at them.
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        uvloop.run(serve(config, spec, text_model))
    except QuireError as error:
        sys.stderr.write(f"quire scheduler: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    except Exception:
        log.critical("quire scheduler failed on a defect", exc_info=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
