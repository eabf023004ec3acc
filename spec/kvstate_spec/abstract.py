"""What machine and reference must agree on: the abstract state after every action, and the answers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import attrs

from kvstate.refusals import Refusal


@attrs.frozen
class StreamAbstract:
    """What machine and reference must agree on about one opened stream."""

    length: int
    released: int
    residency: str
    content_pages: int
    surplus_pages: int
    # Content pages, numbered by first appearance over the sorted streams, per tier: equal numbers are shared pages.
    device: tuple[int, ...]
    host: tuple[int, ...]


@attrs.frozen
class Abstract:
    """What machine and reference must agree on after every action."""

    device_free: int
    host_free: int
    streams: Mapping[tuple[str, str], StreamAbstract]
    leases: Mapping[int, tuple[str, tuple[int, ...]]]
    claims: Mapping[int, str]


def classes(tables: Sequence[Sequence[Hashable]]) -> list[tuple[int, ...]]:
    """Number pages by first appearance: two equal results share pages in the same way.

    >>> classes([[70, 71], [70, 99]])
    [(0, 1), (0, 2)]
    """
    seen: dict[Hashable, int] = {}
    return [tuple(seen.setdefault(page, len(seen)) for page in table) for table in tables]


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
