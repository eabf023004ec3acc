"""Backends that the kit can look into: one stamp per token, written by the model and read back. Found by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.metadata import entry_points
from inspect import signature
from typing import Any, Protocol, runtime_checkable

from kvstate.backend import Backend
from kvstate.ops import Op, Plan, Tier
from kvstate.testing.judge import EdgeJudge
from kvstate.types import Geometry

GROUP = "kvstate.backends"
"""The entry point group: each entry is a callable ``(geometry, *, judge=None)`` that returns a StampedBackend."""


class StampedBackend(Backend, Protocol):
    """A backend whose pages hold one stamp per token and can be read back.

    A table given to it may be a part of a stream's, such as the pages that a window group holds: token 0 is the first
    of its first page. What a group writes overwrites what other groups had in the same bytes of a sector.
    """

    def write(self, plan: Plan, place: int, stamps: Sequence[Any]) -> None:
        """Write what segment `place` of the step computes."""

    def read(self, table: Sequence[int], length: int, group: int = 0) -> list[Any]:
        """Return the stamps of tokens ``0 … length`` of a table of device pages."""

    def read_many(self, tables: Sequence[Sequence[int]], lengths: Sequence[int], group: int = 0) -> list[list[Any]]:
        """Return what `read` gives of each table and length; one gather, where that is cheaper."""

    def read_host(self, table: Sequence[int], length: int, group: int = 0) -> list[Any]:
        """Return the stamps of tokens ``0 … length`` of a table of host pages."""

    def load(self, group: int, table: Sequence[int], start: int, stop: int) -> list[Any]:
        """Return the device stamps of tokens ``start … stop``; token 0 is the first of ``table[0]``."""

    def store(self, group: int, table: Sequence[int], start: int, stamps: Sequence[Any]) -> None:
        """Write device stamps from token `start` on; token 0 is the first of ``table[0]``."""

    def poison(self, tier: Tier, group: int, pages: Iterable[int]) -> None:
        """Spoil `pages`, which became free or are about to be given back."""

    def fail_next(self, kind: type[Op] | None = None, *, fatal: bool = False) -> None:
        """Make the next submit of a `kind` (None: any) fail; `fatal`: the device is lost with it."""

    def fail_none(self) -> int:
        """Forget the failures that were asked for and did not happen yet; return how many those were."""


@runtime_checkable
class CountsBytes(Protocol):
    """A backend with real bytes, which knows how many it has moved."""

    def moved(self) -> dict[str, tuple[int, float]]:
        """Return (bytes, seconds) per direction, under the names that a person reads."""


class BackendNotFound(Exception):
    """No backend of that name can be had; the message says which are installed, or what is missing."""


def installed(group: str, what: str, name: str) -> Callable[..., Any]:
    """Return the entry point called `name` of `group`; `what` it is, for messages.

    Raises
    ------
    BackendNotFound
        When none is installed under that name, or it cannot be imported.
    """
    found = {point.name: point for point in entry_points(group=group)}
    if name not in found:
        names = ", ".join(sorted(found)) or "none (reinstall kvstate)"
        raise BackendNotFound(f"there is no {what} {name!r}; installed: {names}")
    try:
        with warnings.catch_warnings():
            # A torch without numpy says so when it is first imported; nothing here needs numpy.
            warnings.filterwarnings("ignore", "Failed to initialize NumPy")
            loaded: Callable[..., Any] = found[name].load()
    except ImportError as error:
        missing = "; it needs the gpu extra: pip install 'kvstate[gpu]'" if error.name == "torch" else ""
        raise BackendNotFound(f"the {what} {name!r} cannot be imported: {error}{missing}") from error
    return loaded


@cache
def find(name: str) -> Callable[..., StampedBackend]:
    """Return what makes the backend called `name`; raises as `installed` does."""
    return installed(GROUP, "backend", name)


def make(name: str, geometry: Geometry, judge: EdgeJudge | None, **options: int | None) -> StampedBackend:
    """Return a backend by name; options that are None are left to it.

    Raises
    ------
    BackendNotFound
        See `find`.
    ValueError
        When the backend has no such option.
    """
    maker = find(name)
    given = {option: value for option, value in options.items() if value is not None}
    unknown = sorted(given.keys() - signature(maker).parameters.keys())
    if unknown:
        raise ValueError(f"the backend {name!r} has no {', '.join(unknown)}")
    return maker(geometry, judge=judge, **given)
