"""Memory for the KV cache is got ahead of its use, in the order of blocks, and left as it was."""

from __future__ import annotations

import sys

import pytest
import torch

from kernels import reference
from kernels.interface import block_of
from tests.kernels.cpu.tiny_model import Shape, make_spec
from worker_svc import kv_cache, prefault
from worker_svc.kv_cache import KvCache, block_bytes
from worker_svc.prefault import Prefault, populate

BLOCK_SIZE = 16
SPEC = make_spec(Shape())
BLOCK_BYTES = block_bytes(SPEC, BLOCK_SIZE, torch.float32)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slabs of four blocks, pieces of two; one slab is near, two are ahead."""
    num_heads = SPEC.num_layers * SPEC.num_kv_heads
    monkeypatch.setattr(kv_cache, "STREAM_BYTES", 4 * BLOCK_BYTES // num_heads)
    monkeypatch.setattr(prefault, "PIECE_BYTES", 2 * BLOCK_BYTES)
    monkeypatch.setattr(prefault, "NEAR_BYTES", 4 * BLOCK_BYTES)
    monkeypatch.setattr(prefault, "AHEAD_BYTES", 8 * BLOCK_BYTES)


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
    cache = new_cache(11)
    walk = Prefault(cache)
    end = cache.device_blocks.data_ptr()
    while (piece := walk.take(0, is_idle=True)) is not None:
        assert piece.address == end
        end += piece.num_bytes
    assert walk.is_done
    assert end == cache.device_blocks.data_ptr() + cache.device_blocks.nbytes


def test_an_idle_moment_gets_what_is_ahead_and_a_busy_one_what_is_near() -> None:
    cache = new_cache(40)
    walk = Prefault(cache)
    begin = cache.device_blocks.data_ptr()

    def get_all(highest_block: int, *, is_idle: bool) -> list[int]:
        """The first blocks of the pieces, which begin at their slabs' first or third."""
        blocks = []
        while (piece := walk.take(highest_block, is_idle=is_idle)) is not None:
            blocks.append((piece.address - begin) // BLOCK_BYTES)
        return blocks

    assert get_all(0, is_idle=False) == [0, 2, 4, 6]
    assert get_all(0, is_idle=True) == [8, 10]
    assert get_all(3, is_idle=True) == []
    assert get_all(4, is_idle=False) == []
    assert get_all(9, is_idle=False) == [12, 14]
    assert get_all(30, is_idle=False) == [28, 30, 32, 34]  # steps wrote what lies before
    assert get_all(39, is_idle=True) == [36, 38]
    assert walk.is_done and walk.take(39, is_idle=True) is None


@pytest.mark.skipif(sys.platform != "linux", reason="the call is Linux's")
def test_memory_that_is_got_keeps_what_is_in_it() -> None:
    cache = new_cache(10)
    block_of(cache.device_blocks, 3)[:] = 7
    walk = Prefault(cache)
    while (piece := walk.take(0, is_idle=True)) is not None:
        assert populate(piece)
    assert walk.is_done
    assert (block_of(cache.device_blocks, 3) == 7).all()
    assert (cache.device_blocks == 7).sum() * 4 == BLOCK_BYTES


def test_memory_that_is_not_the_process_s_is_not_got() -> None:
    assert not populate(prefault.Piece(1 << 60, 4096))
