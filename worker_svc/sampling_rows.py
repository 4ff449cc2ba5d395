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

    def take(self, rows: npt.NDArray[np.intp]) -> SamplingRows:
        """These rows alone, in this order."""
        return SamplingRows(
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            typical_p=self.typical_p[rows],
            seed=self.seed[rows],
            sequence_index=self.sequence_index[rows],
            output_position=self.output_position[rows],
        )
