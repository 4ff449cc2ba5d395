"""`python -m worker_svc`: one worker process.

Exit codes: 0 drained or stopped; 1 failed on the way; 2 a wrong flag, a model that can't be
loaded, or refused by the scheduler.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence

from shared import logs
from shared.errors import ConfigError, ModelLoadError
from shared.model_files import read_model_spec
from worker_svc.config import WorkerConfig, parse_config
from worker_svc.cpus import pin

log = logging.getLogger("worker_svc")

PARENT_POLL_S = 0.5


def main(argv: Sequence[str]) -> int:
    """Run a worker by its flags; the exit code."""
    try:
        config = parse_config(argv, os.environ)
        if config.exit_with_parent:
            watch_parent()
        if config.cpus is not None:
            pin(config.cpus)
        logs.setup(config.log_level, config.log_format, config.worker_id)
        return serve(config)
    except (ConfigError, ModelLoadError) as error:
        print(f"quire worker: {error}", file=sys.stderr)
        return 2


def serve(config: WorkerConfig) -> int:
    """Be a worker until drained, stopped or failed; the exit code."""
    spec = read_model_spec(config.engine.model_path, use_generation_config=False)
    # Torch takes seconds to import; wrong flags and paths are told without it. Modules stay for
    # good: the collections that importing brings about find nothing, nor need later ones look here.
    gc.disable()
    from worker_svc.engine import resolve_device
    from worker_svc.worker import Refused, StepFailed, Worker

    gc.freeze()
    gc.enable()

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        Worker(config, spec, resolve_device(config.engine.device), stop).run()
    except Refused as error:
        print(f"quire worker: {error}", file=sys.stderr)
        return 2
    except StepFailed:
        return 1  # logged where it happened
    except (ConfigError, ModelLoadError):
        raise
    except Exception:
        log.exception("the worker failed")
        return 1
    return 0


def watch_parent() -> None:
    """End this process soon after the one that started it has ended, whatever it is doing.

    Polls, because the kernel's own signal (PR_SET_PDEATHSIG) already comes when the parent's
    starting thread ends.
    """
    parent = os.getppid()

    def watch() -> None:
        never = threading.Event()
        while os.getppid() == parent:
            never.wait(PARENT_POLL_S)
        os._exit(1)

    threading.Thread(target=watch, name="quire-parent-watch", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
