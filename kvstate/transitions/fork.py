"""Post-forks: what a commit shares and copies. (Pre-forks are shared when their step is admitted, see reserve.)"""

from __future__ import annotations

from kvstate.ops import ForkCopy
from kvstate.ordering import NOTHING, Queue, at, elsewhere, merge
from kvstate.prefix import Key
from kvstate.state import Fork, Lease, OnDevice, Pages, State, Stream, Table
from kvstate.transitions.leaving import content_pages, leave


def keys_shared(source: Stream, target: Stream, pages: int, keys: list[Key] | None = None) -> list[Key]:
    """Return the keys of the first `pages` that a fork hands on: none to a request of another salt.

    `keys` are the source's, if they are about to be others than it has.
    """
    if source.request.config.cache_salt != target.request.config.cache_salt:
        return []
    return (source.keys if keys is None else keys)[:pages]


def apply_post_forks(state: State, lease: Lease, forks: list[Fork]) -> None:
    """Give each target what its source stores now; copy partly filled last pages in one op."""
    size = state.page_size
    copies: list[list[tuple[int, int, int]]] = [[] for _ in state.device.pools]
    roots: list[dict[int, int]] = [{} for _ in state.device.pools]
    after = NOTHING
    leaving: list[tuple[Fork, Pages]] = []
    copied: list[tuple[Stream, int]] = []
    for fork in forks:
        source, target = fork.source.stream, fork.target.stream
        full, tail = divmod(source.length, size)
        tables: list[Table] = []
        old_pages: list[list[int]] = []
        for group, pool in enumerate(state.device.pools):
            source_table, table = source.residency.tables[group], target.residency.tables[group]
            shared = source_table.part(0, full)
            pool.share(shared)
            content = content_pages(state, target)
            old, surplus = table.part(0, content), table.part(content, table.count)
            granted = fork.target.tails[group]
            pages = list(shared)
            if tail:
                page = granted.pop() if granted else surplus.pop(0)
                after = merge(after, pool.fences[page])
                source_page = roots[group].get(source_table[full], source_table[full])
                roots[group][page] = source_page
                copies[group].append((source_page, page, tail))
                pages.append(page)
            pages.extend(surplus)
            tables.append(Table.of(pages, source_table.skip, pool.sink))
            old_pages.append(old)
        after = merge(after, source.written)
        leaving.append((fork, tuple(old_pages)))
        target.residency = OnDevice(tuple(tables), state.room(source.length, target.retention))
        target.length, target.released = source.length, source.released
        target.keys, target.stale = keys_shared(source, target, full), source.stale
        target.written = merge(target.written, source.written)
        target.generation += 1
        target.epoch += 1
        if tail:
            copied.append((target, target.epoch))
    if any(copies):
        op = ForkCopy(state.number(), elsewhere(after, Queue.COMPUTE), lease, tuple(copies), tuple(copied))
        state.outbox.append(op)
        for fork in forks:
            fork.source.stream.used = merge(fork.source.stream.used, at(Queue.COMPUTE, op.number))
            fork.target.stream.written = merge(fork.target.stream.written, at(Queue.COMPUTE, op.number))
    for fork, left in leaving:
        leave(state, fork.target.stream, left)
