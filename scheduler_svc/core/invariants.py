"""What holds between any two events; the full check, for tests and idle times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.replica import MAX_PLANS_IN_FLIGHT, Replica
from scheduler_svc.core.request import Request, Sequence
from scheduler_svc.core.states import SequenceState
from scheduler_svc.core.waiting_queue import WaitingQueue
from shared.ids import ReplicaId, RequestId


def check_scheduler(
    requests: Mapping[RequestId, Request],
    replicas: Mapping[ReplicaId, Replica],
    waiting: WaitingQueue,
) -> None:
    """Raises AssertionError with what is wrong."""
    live = [
        seq
        for request in requests.values()
        for seq in request.sequences
        if seq.state is not SequenceState.FINISHED
    ]
    _check_waiting(live, requests, waiting)
    by_replica: dict[ReplicaId, list[Sequence]] = {replica: [] for replica in replicas}
    for seq in live:
        assert (seq.replica is None) == (seq.state is SequenceState.WAITING), seq.ref
        if seq.replica is not None:
            by_replica[seq.replica].append(seq)
    for request in requests.values():
        assert not request.is_finished, f"{request.id} has ended and is still known"
    for replica_id, replica in replicas.items():
        check_replica(replica, by_replica[replica_id])


def check_replica(replica: Replica, sequences: Iterable[Sequence]) -> None:
    """`sequences` are those that say they are here."""
    running = [seq for seq in sequences if seq.is_running]
    swapped = [seq for seq in sequences if seq.state is SequenceState.SWAPPED]
    assert len(replica.in_flight) <= MAX_PLANS_IN_FLIGHT
    _check_rows(replica, running)
    _check_swapped(replica, swapped)
    tables = [seq.block_table for seq in running]
    _check_pool(replica.kv.pool, tables + [b for r in replica.in_flight for b in r.blocks])
    host_tables = [seq.host_blocks for seq in swapped]
    _check_pool(
        replica.kv.host_pool, host_tables + [b for r in replica.in_flight for b in r.host_blocks]
    )
    deferred = sum(len(blocks) for record in replica.in_flight for blocks in record.blocks)
    assert deferred == replica.num_deferred_blocks
    _check_index(replica)


def _check_waiting(
    live: list[Sequence], requests: Mapping[RequestId, Request], waiting: WaitingQueue
) -> None:
    ordered = list(waiting)
    assert [seq.key for seq in ordered] == sorted(seq.key for seq in ordered)
    held = [
        seq
        for request in requests.values()
        if request.num_held
        for seq in request.sequences[1:]
        if seq.state is SequenceState.WAITING
    ]
    assert sum(request.num_held for request in requests.values()) == len(held)
    expected = [seq for seq in live if seq.state is SequenceState.WAITING]
    assert Counter(map(id, ordered + held)) == Counter(map(id, expected))
    assert len(waiting) == len(expected)
    first = waiting.head(len(ordered))
    assert Counter(map(id, first)) == Counter(map(id, ordered)), "the lanes' turns lose one"
    assert waiting.num_tokens == sum(seq.num_prompt_tokens for seq in expected)


def _check_rows(replica: Replica, running: list[Sequence]) -> None:
    table = replica.table
    assert {id(seq) for seq in table} == {id(seq) for seq in running}
    assert table.num_active == len(running) <= replica.max_num_seqs
    for seq in running:
        row = seq.row
        assert table.sequence(row) is seq and table.refs(np.array([row])) == [seq.ref]
        computed, known, total = (
            int(counts[row]) for counts in (table.num_computed, table.num_tokens, table.num_total)
        )
        assert 0 <= computed < total <= table.limit[row], seq.ref
        assert 0 <= known - len(seq.token_ids) <= table.block_size
        assert known <= total <= known + MAX_PLANS_IN_FLIGHT
        assert computed <= table.capacity[row] == len(seq.block_table) * table.block_size
        assert len(set(seq.block_table)) == len(seq.block_table), "a block twice in one table"
        assert seq.num_published_blocks * table.block_size <= computed
    rows = [seq.row for seq in running]
    handles = rows + replica.retiring + replica.free_handle_list()
    assert sorted(handles) == list(range(table.limit.size)), "a handle is lost or doubled"


def _check_swapped(replica: Replica, swapped: list[Sequence]) -> None:
    assert [seq.key for seq in replica.swapped] == sorted(seq.key for seq in swapped)
    for seq in swapped:
        assert 0 < seq.num_swapped_tokens < len(seq.token_ids)
        assert len(seq.host_blocks) == replica.kv.num_blocks_for(seq.num_swapped_tokens)


def _check_pool(pool: BlockPool, tables: list[list[int]]) -> None:
    """Free and held blocks are all blocks, and reference counts are the tables' entries."""
    held = Counter(block for table in tables for block in table)
    free = pool.free_blocks()
    assert len(free) == len(set(free)) == pool.num_free
    assert len(free) + len(held) == pool.num_blocks, "a block is lost"
    for block in range(pool.num_blocks):
        assert pool.ref_count(block) == held[block], f"block {block} is miscounted"


def _check_index(replica: Replica) -> None:
    """Every published block is a whole one with digest, and each digest has one entry."""
    index = replica.kv.index
    entries = index.entries()
    assert len({entry.digest for entry in entries}) == len(entries) == len(index)
    assert len({entry.block for entry in entries}) == len(entries)
    for entry in entries:
        assert entry.block in index
        assert index.find(entry.digest, entry.parent, entry.tokens) is entry
        assert len(entry.tokens) == 4 * replica.kv.block_size
