"""One torch thread: tiny matrices gain nothing from more, and lose much on a busy machine."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_torch_thread() -> None:
    torch.set_num_threads(1)
