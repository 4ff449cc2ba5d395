"""What holds between any two events; the full check, for tests and idle times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.prefix_index import IndexEntry, Parent
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
    _check_beams(replica)
    _check_swapped(replica, swapped)
    tables = [seq.block_table for seq in running]
    _check_pool(replica.kv.pool, tables + [b for r in replica.in_flight for b in r.blocks])
    host_tables = [seq.host_blocks for seq in swapped]
    _check_pool(
        replica.kv.host_pool, host_tables + [b for r in replica.in_flight for b in r.host_blocks]
    )
    deferred = sum(len(blocks) for record in replica.in_flight for blocks in record.blocks)
    assert deferred == replica.num_deferred_blocks
    _check_index(replica, running)
    _check_pending(replica, running)


def _check_waiting(
    live: list[Sequence], requests: Mapping[RequestId, Request], waiting: WaitingQueue
) -> None:
    ordered = list(waiting)
    assert [seq.key for seq in ordered] == sorted(seq.key for seq in ordered)
    held = [
        seq
        for request in requests.values()
        for seq in request.sequences
        if seq.state is SequenceState.WAITING and _is_held(request, seq)
    ]
    assert sum(request.num_held for request in requests.values()) == len(held)
    expected = [seq for seq in live if seq.state is SequenceState.WAITING]
    assert Counter(map(id, ordered + held)) == Counter(map(id, expected))
    assert len(waiting) == len(expected)
    first = waiting.head(len(ordered))
    assert Counter(map(id, first)) == Counter(map(id, ordered)), "the lanes' turns lose one"
    assert waiting.num_tokens == sum(seq.num_prompt_tokens for seq in expected)


def _is_held(request: Request, seq: Sequence) -> bool:
    if request.new.beam is not None:
        return seq.index > 0 or request.beams is not None
    return request.num_held > 0 and seq.index > 0


def _check_beams(replica: Replica) -> None:
    """A search is here with all that runs of it, and has a seat for each of its beams."""
    num_seats = replica.num_running
    for request in replica.beam_searches.values():
        running = [seq for seq in request.sequences if seq.is_running]
        assert request.beams is not None and running
        assert all(seq.replica == replica.id for seq in running)
        num_seats += len(request.sequences) - len(running)
    assert num_seats <= replica.max_num_seqs, "beams have no seats"


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
        if seq.request.beams is None:
            assert 0 <= computed < total <= table.limit[row], seq.ref
            assert known <= total <= known + MAX_PLANS_IN_FLIGHT
            assert seq.constraint is None or table.limit[row] == known + 1, seq.ref
        else:
            num_chosen = seq.request.beams.num_tokens
            assert 0 <= computed <= total and known == table.limit[row] == seq.num_prompt_tokens
            assert known <= total <= known + num_chosen <= total + 1
        assert len(seq.token_ids) + table.tail(row).size == known
        assert computed <= table.capacity[row] == len(seq.block_table) * table.block_size
        assert len(set(seq.block_table)) == len(seq.block_table), "a block twice in one table"
        assert seq.num_published_blocks * table.block_size <= computed
        assert seq.uses_prefix_cache or seq.num_published_blocks == 0
    constrained = {seq.row: seq for seq in running if seq.constraint is not None}
    assert replica.constrained == constrained
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


def _check_index(replica: Replica, running: list[Sequence]) -> None:
    """Every entry is a whole block with its digest, and is there for a block, for what comes after
    it, or for a running sequence; each digest has one entry."""
    kv, index = replica.kv, replica.kv.index
    entries = index.entries()
    published = [entry for entry in entries if entry.block is not None]
    assert len({entry.digest for entry in entries}) == len(entries)
    assert len({entry.block for entry in published}) == len(published) == len(index)
    known = _with_parents([*entries, *(seq.parent for seq in running)])
    refs = Counter(id(entry.parent) for entry in known)
    refs.update(id(seq.parent) for seq in running)
    for entry in known:
        assert entry.num_refs == refs[id(entry)]
        assert entry.block is not None or entry.num_refs, "an entry of no use"
        assert len(entry.tokens) == 4 * kv.block_size
    for entry in published:
        assert entry.block is not None and entry.block in index
        assert index.find(entry.digest, entry.parent, entry.tokens) is entry
    is_free = kv.pool.is_free()
    assert kv.num_evictable == sum(bool(is_free[entry.block]) for entry in published)


def _with_parents(parents: list[Parent]) -> list[IndexEntry]:
    """All entries of `parents` and before them, each once."""
    known: dict[int, IndexEntry] = {}
    for first in parents:
        parent = first
        while not isinstance(parent, bytes) and id(parent) not in known:
            known[id(parent)] = parent
            parent = parent.parent
    return list(known.values())


def _check_pending(replica: Replica, running: list[Sequence]) -> None:
    """Whoever leads runs here and has the block in its table, not published yet."""
    for digest, leader in replica.kv.pending.leaders():
        assert leader in running
        number = leader.digests.index(digest)
        assert leader.num_published_blocks <= number < len(leader.block_table)
        assert leader.uses_prefix_cache
