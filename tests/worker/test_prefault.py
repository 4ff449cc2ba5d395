"""Memory for the KV cache is got ahead of its use, in the order of blocks, and left as it was."""

from __future__ import annotations

import sys

import pytest
import torch

from kernels import reference
from tests.kernels.cpu.tiny_model import Shape, make_spec
from worker_svc import prefault
from worker_svc.kv_cache import KvCache
from worker_svc.prefault import Prefault, pieces, populate

BLOCK_SIZE = 16
SPEC = make_spec(Shape())
NUM_RUNS = SPEC.num_layers * SPEC.num_kv_heads


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of four blocks of a layer and head; two ranges are ahead."""
    block_bytes = 2 * BLOCK_SIZE * SPEC.head_dim * 4
    monkeypatch.setattr(prefault, "PIECE_BYTES", 4 * block_bytes)
    monkeypatch.setattr(prefault, "AHEAD_BYTES", 8 * block_bytes * NUM_RUNS)


def new_cache(num_blocks: int) -> KvCache:
    return KvCache(
        SPEC,
        block_size=BLOCK_SIZE,
        num_device_blocks=num_blocks,
        num_host_blocks=0,
        dtype=torch.float32,
        device=torch.device("cpu"),
        kernels=reference,
    )


def test_the_pieces_are_all_of_the_pool_once_and_in_the_order_of_its_blocks() -> None:
    cache = new_cache(10)
    found = list(pieces(cache))
    assert [piece.first_block for piece in found] == sorted(piece.first_block for piece in found)
    end = cache.device_blocks.data_ptr()
    for piece in sorted(found, key=lambda piece: piece.address):
        assert piece.address == end
        end += piece.num_bytes
    assert end == cache.device_blocks.data_ptr() + cache.device_blocks.nbytes


def test_an_idle_moment_gets_what_is_ahead_and_a_busy_one_what_is_near() -> None:
    walk = Prefault(new_cache(40))

    def get_all(highest_block: int, *, is_idle: bool) -> int:
        """The number of pieces."""
        count = 0
        while walk.may_get(highest_block, is_idle=is_idle):
            walk.take()
            count += 1
        return count

    assert get_all(0, is_idle=False) == 2 * NUM_RUNS  # blocks 0 to 7
    assert get_all(0, is_idle=True) == NUM_RUNS
    assert get_all(3, is_idle=True) == 0
    assert get_all(12, is_idle=False) == 2 * NUM_RUNS
    assert get_all(39, is_idle=True) == 5 * NUM_RUNS
    assert walk.is_done and not walk.may_get(39, is_idle=True)


@pytest.mark.skipif(sys.platform != "linux", reason="the call is Linux's")
def test_memory_that_is_got_keeps_what_is_in_it() -> None:
    cache = new_cache(10)
    cache.device_blocks[3] = 7
    assert all(populate(piece) for piece in pieces(cache))
    assert (cache.device_blocks[3] == 7).all() and not cache.device_blocks[4:].any()


def test_memory_that_is_not_the_process_s_is_not_got() -> None:
    assert not populate(prefault.Piece(0, 1 << 60, 4096))
