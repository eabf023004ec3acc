"""Refusals: why a transition did not happen, as values.

A refused transition leaves the view of the state as it was. Every refusal names the request and the label it is about
and says, in `kind`, when trying again can help.
"""

from __future__ import annotations

import enum
from typing import ClassVar

import attrs


class Kind(enum.Enum):
    """When to try again."""

    AFTER_EVICTION = "retry after pages were freed"
    AFTER_RELOAD = "retry after the request was reloaded"
    WHEN_LANDED = "retry when the fetch has ended"
    AFTER_LEASE = "retry after the open step has ended"
    AFTER_CLAIM = "retry after the claim has ended"
    AFTER_PLAN = "plan again, or abort"
    AFTER_LAUNCH = "launch the step first"
    AFTER_LOOKUP = "look the prefix up again"
    TERMINAL = "do not retry"


@attrs.frozen(kw_only=True)
class Refusal:
    """Base: the request and label refused; the label is empty where the verb is about the whole request.

    `manager` is the name of the geometry whose manager refused, for messages; it takes no part in comparisons.
    """

    default_kind: ClassVar[Kind] = Kind.TERMINAL
    request: str = ""
    label: str = ""
    manager: str = attrs.field(default="", eq=False, repr=False)

    @property
    def kind(self) -> Kind:
        """When to try again."""
        return self.default_kind

    @property
    def reason(self) -> str:
        """Say in words what stood in the way."""
        return (type(self).__doc__ or "").splitlines()[0].rstrip(".")

    def __str__(self) -> str:
        who = "/".join(part for part in (self.request, self.label) if part)
        name = f"{self.manager}: " if self.manager else ""
        return f"{name}{type(self).__name__}{f' ({who})' if who else ''}: {self.reason}; {self.kind.value}"


@attrs.frozen(kw_only=True)
class UnknownRequest(Refusal):
    """No request of that id is ingested; ingest it first."""


@attrs.frozen(kw_only=True)
class ConfigConflict(Refusal):
    """The request is live with another config."""


def _fragments(fragmented: bool) -> str:
    return " (enough bytes are free, in sectors of other groups)" if fragmented else ""


@attrs.frozen(kw_only=True)
class PagesExhausted(Refusal):
    """Too few device pages are free: `short` = pages wanted − available, whole step, per group.

    `fragmented`: by bytes there is room, but in sectors that other groups hold.
    """

    default_kind = Kind.AFTER_EVICTION
    short: tuple[int, ...]
    fragmented: bool = False

    @property
    def reason(self) -> str:
        return f"{', '.join(map(str, self.short))} device pages short{_fragments(self.fragmented)}"


@attrs.frozen(kw_only=True)
class HostExhausted(Refusal):
    """Too few host pages are free: `short` per group.

    `fragmented`: by bytes there is room, but in sectors that other groups hold.
    """

    default_kind = Kind.AFTER_EVICTION
    short: tuple[int, ...]
    fragmented: bool = False

    @property
    def reason(self) -> str:
        return f"{', '.join(map(str, self.short))} host pages short{_fragments(self.fragmented)}"


@attrs.frozen(kw_only=True)
class TooLarge(Refusal):
    """What this request asks for can never fit: `wanted` distinct pages of `capacity`; of several groups, sectors."""

    wanted: int
    capacity: int

    @property
    def reason(self) -> str:
        return f"it asks for {self.wanted} distinct pages and the pool has {self.capacity}"


@attrs.frozen(kw_only=True)
class PrefixLost(Refusal):
    """Pages of the prefix are gone since they were looked up: only `matched` are left."""

    default_kind = Kind.AFTER_LOOKUP
    matched: int

    @property
    def reason(self) -> str:
        return f"of the prefix that was looked up only {self.matched} pages are left"


@attrs.frozen(kw_only=True)
class NotEmpty(Refusal):
    """Only an empty stream can start on a prefix, and this one stores, or is about to store, `length` tokens."""

    length: int

    @property
    def reason(self) -> str:
        return f"only an empty stream can start on a prefix, and this one has {self.length} tokens"


@attrs.frozen(kw_only=True)
class NotStored(Refusal):
    """More tokens were named than are stored behind the keyed ones: `stored`."""

    stored: int

    @property
    def reason(self) -> str:
        return f"only {self.stored} tokens are stored behind the keyed ones"


@attrs.frozen(kw_only=True)
class NoHostPool(Refusal):
    """There is no host pool (host_pages is 0)."""


@attrs.frozen(kw_only=True)
class StreamNotOnDevice(Refusal):
    """The request is `residency`, not on the device."""

    default_kind = Kind.AFTER_RELOAD
    residency: str

    @property
    def reason(self) -> str:
        return f"the request is {self.residency}"


@attrs.frozen(kw_only=True)
class NotOnHost(Refusal):
    """There is nothing to reload: the request is `residency`."""

    default_kind = Kind.AFTER_CLAIM
    residency: str

    @property
    def kind(self) -> Kind:
        waits = {"Fetching": Kind.WHEN_LANDED, "OnDevice": Kind.TERMINAL, "FetchFailed": Kind.TERMINAL}
        return waits.get(self.residency, self.default_kind)

    @property
    def reason(self) -> str:
        return f"nothing to reload, the request is {self.residency}"


@attrs.frozen(kw_only=True)
class StreamBusy(Refusal):
    """An open step names a stream of this request."""

    default_kind = Kind.AFTER_LEASE


@attrs.frozen(kw_only=True)
class ForkPending(Refusal):
    """The stream is the target of a post-fork that has not been committed."""

    default_kind = Kind.AFTER_LEASE


@attrs.frozen(kw_only=True)
class FetchPending(Refusal):
    """A fetch into this stream has not ended."""

    default_kind = Kind.WHEN_LANDED


@attrs.frozen(kw_only=True)
class FetchFailed(Refusal):
    """A fetch into this stream failed; reset the request to clear it."""

    error: str

    @property
    def reason(self) -> str:
        return f"a fetch into it failed ({self.error}); reset the request to clear it"


@attrs.frozen(kw_only=True)
class OnRemoteHost(Refusal):
    """The publisher has offloaded this stream: nothing to read until it reloads and publishes again."""

    default_kind = Kind.AFTER_RELOAD


@attrs.frozen(kw_only=True)
class WorldSizeMismatch(Refusal):
    """The publication comes from `published` ranks, this worker has `expected`."""

    published: int
    expected: int

    @property
    def reason(self) -> str:
        return f"the publication comes from {self.published} ranks, this worker has {self.expected}"


@attrs.frozen(kw_only=True)
class LayoutMismatch(Refusal):
    """The publication does not continue what this stream stores: other page size, or other tokens left its front."""


@attrs.frozen(kw_only=True)
class StalePlan(Refusal):
    """Segments of the plan will not count: `void` are their places. Planning again sends them to the sink."""

    default_kind = Kind.AFTER_PLAN
    void: tuple[int, ...] = ()
    ended: bool = False

    @property
    def kind(self) -> Kind:
        return Kind.TERMINAL if self.ended else self.default_kind

    @property
    def reason(self) -> str:
        if self.ended:
            return "the lease has ended, or a newer plan replaced this one"
        if not self.void:
            return "a stream that the step names has changed; planning again leaves it out"
        return f"segments {', '.join(map(str, self.void))} are void; planning again sends them to the sink"


@attrs.frozen(kw_only=True)
class NotLaunched(Refusal):
    """The step's launch has not exited; commit follows launch."""

    default_kind = Kind.AFTER_LAUNCH


@attrs.frozen(kw_only=True)
class AlreadyLaunched(Refusal):
    """The step was launched; a lease is launched once."""


@attrs.frozen(kw_only=True)
class OutOfOrder(Refusal):
    """An older lease on the same stream comes first."""

    default_kind = Kind.AFTER_LEASE


@attrs.frozen(kw_only=True)
class LeaseEnded(Refusal):
    """The lease was committed or aborted before; it ends once."""


@attrs.frozen(kw_only=True)
class ClaimEnded(Refusal):
    """The claim or fetch was ended before; it ends once."""


@attrs.frozen(kw_only=True)
class CopyFailed(Refusal):
    """A copy failed at submit; abandon the claim, or abort the lease."""

    error: str

    @property
    def reason(self) -> str:
        return f"its copy failed at submit ({self.error}); abandon the claim, or abort the lease"


@attrs.frozen(kw_only=True)
class ManagerPoisoned(Refusal):
    """The device failed after a submit; nothing is accepted any more."""

    error: str

    @property
    def reason(self) -> str:
        return f"the device failed after a submit ({self.error}); build a new manager"


@attrs.frozen(kw_only=True)
class ManagerClosed(Refusal):
    """The manager is closed."""
