"""Retention: which pages of a stream leave from the front when a step commits."""

from __future__ import annotations

from kvstate.state import Pages, Table, Tables
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
    tables: Tables, length: int, released: int, policy: RetentionPolicy | None, page_size: int
) -> tuple[Tables, int, int, Pages]:
    """Return (tables, length, released, pages that leave per group) after `policy` was applied."""
    if policy is None:
        return tables, length, released, ()
    first, count = pages_outside(length, policy, page_size)
    if not count:
        return tables, length, released, ()
    kept = []
    gone = []
    for table in tables:
        pages = list(table)
        gone.append(pages[first : first + count])
        del pages[first : first + count]
        kept.append(Table(pages, len(pages)))
    moved = count * page_size
    return tuple(kept), length - moved, released + moved, tuple(gone)
