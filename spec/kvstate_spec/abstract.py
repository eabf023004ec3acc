"""What machine and reference must agree on: the abstract state after every action, and the answers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import attrs

from kvstate.refusals import Refusal

Counts = tuple[int, ...]
"""A number per group."""


@attrs.frozen
class StreamAbstract:
    """What machine and reference must agree on about one opened stream."""

    length: int
    released: int
    residency: str
    # Pages held, leading places that a window has left, and surplus pages, per group.
    content_pages: Counts
    surplus_pages: Counts
    # Per group the content pages, numbered by first appearance over the sorted streams, per tier: equal numbers are
    # shared pages.
    device: tuple[tuple[int, ...], ...]
    host: tuple[tuple[int, ...], ...]
    skipped: Counts
    keyed: int = 0
    stale: bool = False


@attrs.frozen
class Abstract:
    """What machine and reference must agree on after every action."""

    device_owned: Counts
    host_owned: Counts
    streams: Mapping[tuple[str, str], StreamAbstract]
    leases: Mapping[int, tuple[str, tuple[int, ...]]]
    claims: Mapping[int, str]
    # Per (group, key in hex) the number of the page that it finds, in the numbering of `device`; None when no opened
    # stream has that page.
    findable: Mapping[tuple[int, str], int | None] = attrs.field(factory=dict)
    # Keys in hex of the pages that only their key keeps, the next to leave first, per group.
    cached: tuple[tuple[str, ...], ...] = ((),)
    key_epoch: int = 0


class Classes:
    """Numbers pages by first appearance: two equal numberings share pages in the same way.

    >>> numbers = Classes()
    >>> numbers.of([70, 71]), numbers.of([70, 99]), numbers.known(99), numbers.known(5)
    ((0, 1), (0, 2), 2, None)
    """

    def __init__(self) -> None:
        self._seen: dict[Hashable, int] = {}

    def of(self, table: Sequence[Hashable]) -> tuple[int, ...]:
        """Return the numbers of the pages of a table; pages that were not seen before get the next ones."""
        return tuple(self._seen.setdefault(page, len(self._seen)) for page in table)

    def known(self, page: Hashable) -> int | None:
        """Return the number of a page, None if it was not seen."""
        return self._seen.get(page)


def agrees(expected: object, actual: object) -> str | None:
    """Say how the machine's answer differs from the expected one, None if it does not.

    Two refusals agree when class and payload are equal. An empty request or label of the expected one is not fixed by
    the sentences, and not compared. Outcomes agree in not being refusals; their values are the driver's to compare.
    """
    if not isinstance(expected, Refusal):
        return f"expected no refusal, got {actual!r}" if isinstance(actual, Refusal) else None
    if not isinstance(actual, Refusal):
        return f"expected {expected!r}, got {actual!r}"
    if type(expected) is not type(actual):
        return f"expected {expected!r}, got {actual!r}"
    for field in attrs.fields(type(expected)):
        want, got = getattr(expected, field.name), getattr(actual, field.name)
        if field.eq and want != got and not (field.name in ("request", "label") and want == ""):
            return f"expected {field.name} {want!r} of {type(expected).__name__}, got {got!r} ({actual!r})"
    return None
