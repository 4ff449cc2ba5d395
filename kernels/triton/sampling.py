"""Draws a token of each row: which kernel takes which rows.

Every row goes to `best_kernel`; those that draw, then, to `draw_kernel`, and with filters to
`gather_kernel` and `draw_candidates_kernel`. All that a row goes through depends on its own
parameters alone, one program computes it, and its sums are of integers (the typical filter's mean
is not, but its order is fixed): it draws the same token in any company. Nothing comes back from the
device but ids and whether they are sound.

The two kernels of filters are two, for threads see each other's stores to memory only where there
is a barrier between: the end of a kernel is one.
"""

from __future__ import annotations

import numpy as np
import torch

from kernels.logits import Drawn, Draws
from kernels.triton.draw import EMPTY, SOUND, best_kernel, draw_candidates_kernel, draw_kernel
from kernels.triton.gather import gather_kernel
from kernels.triton.parameters import pack
from kernels.triton.tiling import next_power_of_two
from kernels.triton.weights import MAX_VOCAB_SIZE

MAX_BLOCK = 4096
"""Tokens that a program takes at once, for 16 warps."""
MIN_BLOCK = 256
TOKENS_PER_WARP = 256
"""8 per thread, and so at least one however small a block is."""

MAX_GATHERED_BYTES = 128 << 20
"""What the candidates of one launch may take: 64 rows of 128k tokens."""

_CANDIDATE_BYTES = 16


def draw_tokens(logits: torch.Tensor, draws: Draws) -> Drawn:
    """See `LogitKernels.draw_tokens`."""
    num_rows, vocab_size = logits.shape
    if not num_rows:
        none = np.zeros(0, np.bool_)
        return Drawn(np.zeros(0, np.int64), none, none)
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    assert draws.temperature.shape == (num_rows,) and 0 < vocab_size <= MAX_VOCAB_SIZE
    assert ((draws.numbers >= 0) & (draws.numbers < 1)).all()  # or a kernel would never end
    device, stride = logits.device, logits.stride(0)
    options = draw_options(vocab_size)
    highest = torch.empty(num_rows, dtype=torch.float32, device=device)
    results = torch.empty((num_rows, 2), dtype=torch.int32, device=device)
    best_kernel[(num_rows,)](logits, highest, results, stride, vocab_size, **options)

    is_drawn, is_filtered = draws.temperature > 0, draws.filtered(vocab_size)
    plain = np.flatnonzero(is_drawn & ~is_filtered)
    if len(plain):
        parameters = pack(draws, plain, device)
        draw_kernel[(len(plain),)](
            logits, highest, parameters, results, stride, vocab_size, **options
        )
    filtered = np.flatnonzero(is_drawn & is_filtered)
    rows_at_once = max(1, MAX_GATHERED_BYTES // (_CANDIDATE_BYTES * vocab_size))
    for start in range(0, len(filtered), rows_at_once):
        rows = filtered[start : start + rows_at_once]
        parameters = pack(draws, rows, device)
        keys = torch.empty((len(rows), vocab_size), dtype=torch.int64, device=device)
        counts = torch.empty(len(rows), dtype=torch.int32, device=device)
        totals = torch.empty(len(rows), dtype=torch.int64, device=device)
        gathered = (keys, torch.empty_like(keys), counts, totals)
        gather_kernel[(len(rows),)](
            logits, highest, parameters, *gathered, stride, vocab_size, **options
        )
        draw_candidates_kernel[(len(rows),)](parameters, *gathered, results, vocab_size, **options)
    token_ids, states = results.cpu().numpy().T
    return Drawn(token_ids.astype(np.int64), states == SOUND.value, states == EMPTY.value)


def draw_options(vocab_size: int) -> dict[str, int]:
    """Compile-time arguments of all four kernels."""
    block = min(MAX_BLOCK, max(MIN_BLOCK, next_power_of_two(vocab_size)))
    num_warps = max(1, block // TOKENS_PER_WARP)
    return {"BLOCK": block, "num_warps": num_warps, "enable_fp_fusion": False}
