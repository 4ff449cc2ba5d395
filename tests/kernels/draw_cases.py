"""Parameters of draws, the rule written out plainly, and what filters leave of known shares."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kernels.logits import Draws
from shared.sampling import SamplingParams


def draws_of(params: Sequence[SamplingParams], numbers: npt.ArrayLike) -> Draws:
    return Draws(
        temperature=np.array([0 if p.is_greedy else p.temperature for p in params], np.float32),
        top_k=np.array([p.top_k for p in params], np.int64),
        top_p=np.array([p.top_p for p in params], np.float32),
        min_p=np.array([p.min_p for p in params], np.float32),
        typical_p=np.array([p.typical_p for p in params], np.float32),
        numbers=np.array(numbers, np.float64),
    )


def oracle(logits: np.ndarray, params: SamplingParams, number: float) -> int:
    """The rule as written, with a full sort: slow and plain."""
    scores = logits.astype(np.float64)
    if params.is_greedy:
        return int(scores.argmax())
    weights = np.exp((scores - scores.max()) / float(np.float32(params.temperature)))
    ranked = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    if params.top_k:
        ranked = ranked[: params.top_k]
    if params.top_p < 1.0:
        share = float(np.float32(params.top_p)) * weights[ranked].sum()
        reached = np.cumsum(weights[ranked]) >= share
        ranked = ranked[: int(reached.argmax()) + 1]
    least = float(np.float32(params.min_p))
    kept = [token for token in ranked if weights[token] >= least and weights[token] > 0]
    if params.typical_p < 1.0:
        kept = typical_of(weights, sorted(kept), float(np.float32(params.typical_p)))
    running = np.cumsum([weights[token] for token in sorted(kept)])
    return sorted(kept)[int(np.searchsorted(running, number * running[-1], side="right"))]


def typical_of(weights: np.ndarray, kept: list[int], typical_p: float) -> list[int]:
    share = weights[kept] / weights[kept].sum()
    entropy = -(share * np.log(share)).sum()
    distance = np.abs(-np.log(share) - entropy)
    order = np.argsort(distance, kind="stable")
    last = int((np.cumsum(share[order]) >= typical_p).argmax())
    return [
        token for token, far in zip(kept, distance, strict=True) if far <= distance[order[last]]
    ]


PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.3, top_p=0.9),
    SamplingParams(temperature=2.0, top_p=0.999),
    SamplingParams(temperature=1.0, min_p=0.2),
    SamplingParams(temperature=0.9, top_k=7, top_p=0.8, min_p=0.05),
    SamplingParams(temperature=1.0, top_k=10**6, top_p=0.5),
    SamplingParams(temperature=1.0, top_k=9, min_p=0.3),
    SamplingParams(temperature=1.0, top_p=0.95, min_p=0.3),
    SamplingParams(temperature=1.0, typical_p=0.5),
    SamplingParams(temperature=1.4, typical_p=0.97),
    SamplingParams(temperature=2.5, min_p=0.4, typical_p=0.6),
    SamplingParams(temperature=1.2, top_k=30, top_p=0.95, min_p=0.01, typical_p=0.8),
]


SHARES = np.array([0.05, 0.3, 0.02, 0.2, 0.13, 0.1, 0.2], np.float64)
"""Of seven tokens; two are equal."""
FILTERED: dict[str, tuple[SamplingParams, Sequence[int], float]] = {
    "none": (SamplingParams(), range(7), 1.0),
    "temperature": (SamplingParams(temperature=0.5), range(7), 2.0),
    "heat": (SamplingParams(temperature=4.0), range(7), 0.25),
    "top_k": (SamplingParams(top_k=3), [1, 3, 6], 1.0),
    "top_k cuts equals": (SamplingParams(top_k=2), [1, 3], 1.0),
    "top_p": (SamplingParams(top_p=0.75), [1, 3, 6, 4], 1.0),
    "min_p": (SamplingParams(min_p=0.3), [1, 3, 6, 4, 5], 1.0),
    # Surprise 1.2, 1.6, 1.6, 2.0, 2.3, 3.0, 3.9 at an entropy of 1.74.
    "typical_p": (SamplingParams(typical_p=0.5), [3, 6, 4], 1.0),
    "all": (
        SamplingParams(temperature=0.5, top_k=6, top_p=0.98, min_p=0.1, typical_p=0.5),
        [1, 3, 6],
        2.0,
    ),
}
"""Parameters, the tokens that they leave, and the power of their shares."""
CHI_SQUARE = (10.8, 13.8, 16.3, 18.5, 20.5, 22.5)
"""By degrees of freedom, 1 to 6: p = 0.001."""
