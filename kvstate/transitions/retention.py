"""Which pages leave a stream's front when a step commits: those its policy drops, then those its windows left.

Retention drops tokens: `length` falls and positions stay. A window only lets go of pages, in its own group: the tokens
in front of it are stored as far as the other groups are concerned. Both go by the tokens that were accepted, and what
has left does not come back.
"""

from __future__ import annotations

from kvstate.state import Pages, State, Table, Tables
from kvstate.types import RetentionPolicy


def pages_outside(length: int, policy: RetentionPolicy, page_size: int) -> tuple[int, int]:
    """Return (first page, number of pages) that `policy` lets go of a stream that stores `length` tokens.

    The protected prefix keeps its whole pages; a page leaves only when every token of it lies in front of the last
    ``context_budget`` tokens.

    >>> pages_outside(40, RetentionPolicy(context_budget=8, protected_prefix=5), page_size=4)
    (2, 6)
    >>> pages_outside(11, RetentionPolicy(context_budget=8), page_size=4)
    (0, 0)
    """
    first = -(-policy.protected_prefix // page_size)
    return first, max(0, (length - policy.context_budget) // page_size - first)


def retain(
    state: State, tables: Tables, length: int, released: int, policy: RetentionPolicy | None
) -> tuple[Tables, int, int, Pages]:
    """Return (tables, length, released, pages that leave per group) after `policy` and the windows were applied."""
    gone: Pages = ()
    if policy is not None:
        first, count = pages_outside(length, policy, state.page_size)
        if count:
            cuts = [_without(table, first, count) for table in tables]
            tables, gone = tuple(table for table, _ in cuts), tuple(left for _, left in cuts)
            length -= count * state.page_size
            released += count * state.page_size
    if state.windows:
        tables, left = slide(state, tables, length)
        if any(left):
            gone = tuple(own + more for own, more in zip(gone, left, strict=True)) if gone else left
    return tables, length, released, gone


def _without(table: Table, first: int, count: int) -> tuple[Table, list[int]]:
    """Return `table` without pages ``first … first + count``, and those of them that it held."""
    kept = table.part(0, first) + table.part(first + count, table.count)
    skip = table.skip if table.skip <= first else max(first, table.skip - count)
    return Table.of(kept, skip), table.part(first, first + count)


def slide(state: State, tables: Tables, length: int) -> tuple[Tables, Pages]:
    """Return (tables, pages that leave per group) of a stream that stores `length` tokens."""
    slid = list(tables)
    gone = state.no_pages()
    for group in state.windows:
        skip = state.geometry.skipped(group, length)
        gone[group].extend(tables[group].part(0, skip))
        slid[group] = tables[group].slid(skip)
    return tuple(slid), gone
