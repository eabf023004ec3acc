"""The most that one request can need, so that what can never fit is refused before it holds anything."""

from __future__ import annotations

from collections.abc import Sequence

from kvstate.types import Geometry, RetentionPolicy


def pages_at_most(
    geometry: Geometry, prompt: int, tokens_max: int, chunk: int, retention: RetentionPolicy | None = None
) -> tuple[int, ...]:
    """Return the most pages per group that a request holds at once, in steps of at most `chunk` tokens.

    The last token generated is never stored. A window group holds the window in front of a step and what the step
    computes; with a retention policy, what it keeps and what the step computes.

    >>> from kvstate.types import Group
    >>> mixed = Geometry(pages=8, page_size=4, groups=(Group("full"), Group("window", window=6)))
    >>> pages_at_most(mixed, prompt=30, tokens_max=11, chunk=8)
    (10, 4)
    """
    total = prompt + tokens_max - 1
    size = geometry.page_size
    if retention is not None:
        # A page leaves when all of its tokens are outside, so up to a page more is kept, in front of the step.
        kept = geometry.pages_for(retention.protected_prefix) * size + retention.context_budget + size
        total = min(total, kept + chunk)
    return tuple(
        geometry.pages_for(total) if group.window is None else _window_pages(geometry, place, total, chunk)
        for place, group in enumerate(geometry.groups)
    )


def _window_pages(geometry: Geometry, group: int, total: int, chunk: int) -> int:
    """Return the most pages of a window group.

    That many are held in front of the last whole chunk or less than a page earlier: every way in which window, chunk
    and pages can lie occurs there, or the window is not full before.
    """
    last = max(0, total - chunk)
    return max(
        geometry.pages_for(min(total, start + chunk)) - geometry.skipped(group, start)
        for start in range(max(0, last - geometry.page_size + 1), last + 1)
    )


def fits(geometry: Geometry, pages: Sequence[int]) -> bool:
    """Tell whether so many pages per group fit into a device pool that holds nothing else."""
    return geometry.sectors_for(pages) <= geometry.pages


def largest_chunk(
    geometry: Geometry, prompt: int, tokens_max: int, chunk: int, retention: RetentionPolicy | None = None
) -> int:
    """Return the largest chunk, `chunk` or that halved again and again, with which a request fits alone; 0 if none.

    Only what a window or a policy lets go can make a smaller chunk fit.
    """
    while chunk and not fits(geometry, pages_at_most(geometry, prompt, tokens_max, chunk, retention)):
        chunk //= 2
    return chunk


def largest_fork(geometry: Geometry, prompt: int, samples: int, chunk: int) -> int:
    """Return the largest chunk, as `largest_chunk` does, in which a prompt can be finished and forked; 0 if none.

    Each further sample is a fork, for which a page is held until the step has committed: it might end inside a page.
    """
    tails = samples - 1 if geometry.page_size > 1 else 0
    while chunk:
        start = max(0, prompt - chunk)
        held = [geometry.pages_for(prompt) - geometry.skipped(group, start) for group in range(len(geometry.groups))]
        if fits(geometry, [pages + tails for pages in held]):
            break
        chunk //= 2
    return chunk
