"""A backend that does nothing, for measuring what stands in front of one."""

from __future__ import annotations

from kvstate.ops import Op
from kvstate.ordering import NOTHING, Clock


class NullBackend:
    """Submits nothing."""

    def submit(self, op: Op) -> None:
        """Do nothing."""

    def skip(self, op: Op) -> None:
        """Do nothing."""

    def completed(self) -> Clock:
        """Return nothing: no copy ever ran."""
        return NOTHING

    def wait(self, clock: Clock) -> None:
        """Return at once."""

    def lose(self, why: str) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
