"""The scheduler's own options, as `quire serve` passes them on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PreemptionOption = Annotated[
    str | None, typer.Option(help="recompute, swap or auto (default), when KV blocks run out")
]
PolicyOption = Annotated[
    str | None, typer.Option(help="who goes first: fcfs, priority (default) or fair")
]
TargetItlOption = Annotated[
    float | None,
    typer.Option(min=0, help="milliseconds between tokens beside long prompts; 0: no target"),
]
RecordOption = Annotated[
    Path | None,
    typer.Option(help="write what the scheduler does, prompts included, to this new file"),
]
