"""What the manager asks of a backend and of a transport. Neither ever calls back.

A backend runs ops on queues, and those always complete. A transport runs fetches, which are on no queue, may fail late,
and end only by what ``poll`` says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import attrs

from kvstate.ops import FetchBegin, Op
from kvstate.ordering import Clock

if TYPE_CHECKING:
    from kvstate.state import Fetch


@attrs.frozen
class Landed:
    """All bytes are there, and the publisher still held the epoch after the copy."""


@attrs.frozen
class Failed:
    """The fetch ended without all bytes; what it wrote is undefined."""

    error: str


@attrs.frozen
class Cancelled:
    """The transport will not write another byte of a fetch whose cancel was asked for."""


Outcome = Landed | Failed | Cancelled


class Backend(Protocol):
    """Runs ops. ``submit`` and ``skip`` are called in number order, one at a time, under the submission lock."""

    def submit(self, op: Op) -> None:
        """Submit one op. The device waits for ``op.after``, the host does not.

        A step's kernels are submitted by the model between its StepBegin and its StepEnd. FetchBegin and FetchEnd are
        handed over for the record only: a transport does the work.

        Raises
        ------
        SubmitError
            Nothing of the op ran; the manager calls ``skip`` next. A StepEnd moves nothing, so it must not fail so.
        Poisoned
            The device failed and its memory is unknown.
        """

    def skip(self, op: Op) -> None:
        """Keep the place of an op that failed at submit: an empty op that follows ``op.after``.

        Also called for a FetchBegin that its transport refused, submitted before or not.
        """

    def completed(self) -> Clock:
        """Return the newest op per queue that the host has seen complete."""

    def wait(self, clock: Clock) -> None:
        """Block until everything that `clock` names has completed. Called without any lock held.

        Raises
        ------
        Poisoned
            The device failed, so it never will.
        """

    def lose(self, why: str) -> None:
        """Hear that the manager gave up: no op follows, so whoever waits must hear Poisoned. Must not raise."""

    def close(self) -> None:
        """Release the memory. Twice is harmless.

        A launch that is running may still end: ops submitted from now on do nothing, and complete.
        """


class Transport(Protocol):
    """Writes the bytes of fetches into this manager's pages."""

    def start(self, op: FetchBegin) -> None:
        """Begin the fetch of `op`: its first byte is written after ``op.after`` has completed.

        Raises
        ------
        SubmitError
            Nothing was written and nothing will be; ``poll`` stays silent about it.
        """

    def cancel(self, fetch: Fetch) -> None:
        """Ask for the end of a fetch; it may still land or fail. Ignores what it does not know. Must not raise."""

    def poll(self) -> list[tuple[Fetch, Outcome]]:
        """Return the fetches that ended since the last call, each once.

        Whatever the outcome, it is reported only after ``op.after`` has completed: who comes after the fetch relies on
        that wait and does not repeat it.
        """
