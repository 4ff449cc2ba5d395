"""Before any test module is imported: Triton's kernels run in its interpreter where no GPU is.

The variable counts when `triton.jit` decorates, in Triton's own library too, and any import of
transformers brings Triton along; so it is set here, before all of them.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
