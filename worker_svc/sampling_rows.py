"""The sampling parameters of a step's rows, as arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """One value a row [n]; see `shared.sampling.SamplingParams`."""

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    typical_p: npt.NDArray[np.float32]
    seed: npt.NDArray[np.uint64]
    sequence_index: npt.NDArray[np.int64]
    output_position: npt.NDArray[np.int64]
    """How many tokens the sequence has generated before this one."""
