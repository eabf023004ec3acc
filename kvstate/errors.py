"""Errors: what the caller, the backend or kvstate itself did wrong. Refusals are values instead."""

from __future__ import annotations

from typing import Any


class KVStateError(Exception):
    """Base of every error that kvstate raises."""


class Refused(KVStateError):
    """A refusal met where only an exception fits: inside ``with manager.launch(plan):``.

    Attributes
    ----------
    refusal
        The typed value.
    """

    def __init__(self, refusal: Any) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


class DoubleFree(KVStateError):
    """A page was dropped by somebody who did not own it."""

    def __init__(self, tier: str, page: int) -> None:
        super().__init__(f"{tier} page {page} has no owner left to drop it; this is a bug in the caller of Arena.drop")
        self.tier = tier
        self.page = page


class TableTooShort(KVStateError):
    """A page table covers less than its length: an internal error, never a truncated slice."""

    def __init__(self, wanted: int, count: int) -> None:
        super().__init__(f"a view needs {wanted} pages and its table has {count}; please report the trace")
        self.wanted = wanted
        self.count = count


class AcceptedMismatch(KVStateError, ValueError):
    """`accepted` does not describe the step it is given for. Nothing was committed."""


class ForeignHandle(KVStateError):
    """A lease, plan, claim or fetch was given to a manager that did not hand it out. Nothing was changed."""

    def __init__(self, handle: object) -> None:
        super().__init__(f"{handle!r} belongs to another manager; give each handle back to the manager it came from")


class SubmitError(KVStateError):
    """A backend could not submit one op; nothing of it ran. Its claim or lease is ended by its owner."""


class Poisoned(KVStateError):
    """The device failed after a submit: its memory is unknown and the manager refuses everything from then on."""


class PromiseBroken(KVStateError):
    """An ALWAYS promise does not hold.

    Attributes
    ----------
    promise
        Its name in ``kvstate.invariants``.
    """

    def __init__(self, promise: str, sentence: str, detail: str) -> None:
        super().__init__(f"promise broken: {promise}: {detail} (promised: {sentence})")
        self.promise = promise
        self.sentence = sentence
        self.detail = detail


class LockHeld(KVStateError):
    """A blocking verb was called by a thread that holds a lock of the manager."""
