"""What both transports share: a thread per fetch, the outcome of each, and faults on demand.

A fetch waits for its peer, never for another fetch: a peer that hangs costs the others nothing.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, Self

import attrs
import torch

from gpu_backend.transports.pages import Pages
from kvstate.backend import Cancelled, Failed, Landed, Outcome
from kvstate.errors import KVStateError, SubmitError
from kvstate.ops import FetchBegin
from kvstate.ordering import Clock
from kvstate.types import Record

EpochHolds = Callable[[int, str, int], bool]
"""(incarnation, label, epoch) → whether pages published so still hold that content."""


class PeerLost(KVStateError):
    """A publisher that is not reached, or that left before it had confirmed.

    Attributes
    ----------
    address
        Of the publisher.
    """

    def __init__(self, address: str, why: str) -> None:
        super().__init__(why)
        self.address = address


class PagesDiffer(KVStateError):
    """A publisher keeps pages of another geometry or dtype: their bytes mean something else here."""

    def __init__(self, address: str, theirs: Pages, ours: Pages) -> None:
        super().__init__(f"{address!r} keeps pages of another geometry: {theirs}; here are {ours}")
        self.address = address


def _no(_: FetchBegin) -> bool:
    return False


@attrs.frozen
class Faults:
    """What goes wrong, for tests and rehearsals; as constructed, nothing.

    Parameters
    ----------
    refuse, fail, short, never
        Asked for each fetch; True makes its start fail; makes it fail over garbage; makes it fail over the first half
        of its tokens; makes it wait for ever, so that only a cancel ends it.
    delay_s
        Between the start of a fetch and its copy.
    """

    refuse: Callable[[FetchBegin], bool] = _no
    fail: Callable[[FetchBegin], bool] = _no
    short: Callable[[FetchBegin], bool] = _no
    never: Callable[[FetchBegin], bool] = _no
    delay_s: float = 0.0


class Source(Protocol):
    """A publisher as one fetch reaches it."""

    def open(self) -> Pages:
        """Return the publisher's pages, the same ones every time; raise PeerLost when they cannot be had."""

    def check(self) -> None:
        """Raise PeerLost when the publisher is gone."""

    def holds(self, incarnation: int, label: str, epoch: int) -> bool:
        """Ask whether that content still holds; raise PeerLost when there is no answer."""

    def interrupt(self) -> None:
        """Make whatever waits for the publisher raise PeerLost at once. Called from another thread."""

    def close(self) -> None:
        """Let go of the publisher's memory."""


class Job:
    """One fetch on its way, and the thread that it is."""

    def __init__(self, op: FetchBegin, run: Callable[[Job], None]) -> None:
        self.op = op
        self.cancelled = threading.Event()
        self.source: Source | None = None
        self.thread = threading.Thread(target=run, args=(self,), name=f"kvstate-fetch-{op.number}", daemon=True)

    def cancel(self) -> None:
        """Ask for the end."""
        self.cancelled.set()
        source = self.source
        if source is not None:
            source.interrupt()


class FetchTransport:
    """Runs each fetch in a thread of its own. Use it in a ``with`` block, or close it.

    Parameters
    ----------
    pages
        Of the consumer.
    wait
        Blocks until a clock has completed: the consumer's ``Backend.wait``.
    faults
        What goes wrong.
    """

    def __init__(self, pages: Pages, wait: Callable[[Clock], None], faults: Faults | None = None) -> None:
        self.pages = pages
        self.wait_for = wait
        self.faults = faults or Faults()
        self._jobs: dict[Any, Job] = {}
        self._outcomes: list[tuple[Any, Outcome]] = []
        self._closed = False
        # Guards the three above. Not held while bytes move or a publisher is asked.
        self._changed = threading.Condition()

    # -- the Transport protocol

    def start(self, op: FetchBegin) -> None:
        """Begin the fetch of `op` in a thread."""
        if self.faults.refuse(op):
            raise SubmitError(f"#{op.number} FetchBegin was made to fail")
        job = Job(op, self._work)
        with self._changed:
            if self._closed:
                raise SubmitError("the transport is closed")
            try:
                job.thread.start()
            except RuntimeError as error:
                raise SubmitError(f"#{op.number} FetchBegin gets no thread: {error}") from error
            self._jobs[op.fetch] = job

    def cancel(self, fetch: Any) -> None:
        """Ask for the end of a fetch: it comes after the piece that is being copied; nothing else is waited for."""
        with self._changed:
            job = self._jobs.get(fetch)
        if job is not None:
            job.cancel()

    def poll(self) -> list[tuple[Any, Outcome]]:
        """Return the fetches that ended since the last call."""
        with self._changed:
            outcomes, self._outcomes = self._outcomes, []
        return outcomes

    # -- around it

    def wait(self, count: int = 1, timeout_s: float = 60.0) -> bool:
        """Block until ``poll`` has `count` outcomes; return whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._outcomes) >= count, timeout_s)

    def close(self) -> None:
        """Cancel what has not ended and wait for its threads; ``poll`` then has an outcome for each."""
        with self._changed:
            self._closed = True
            jobs = list(self._jobs.values())
        for job in jobs:
            job.cancel()
        for job in jobs:
            job.thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- one fetch, in its thread

    def _work(self, job: Job) -> None:
        outcome: Outcome
        try:
            self.wait_for(job.op.after)
            outcome = self._run(job)
        except KVStateError as error:
            outcome = Failed(str(error))
        except Exception as error:  # a thread that dies would leave its fetch pending for ever
            outcome = Failed(f"{type(error).__name__}: {error}")
        # Everything of the peer is let go before the outcome is known, so whoever sees it may count what is left.
        source, job.source = job.source, None
        if source is not None:
            source.close()
            del source
        with self._changed:
            del self._jobs[job.op.fetch]
            self._outcomes.append((job.op.fetch, Cancelled() if job.cancelled.is_set() else outcome))
            self._changed.notify_all()

    def _run(self, job: Job) -> Outcome:
        op, faults = job.op, self.faults
        if faults.never(op):
            job.cancelled.wait()
        if job.cancelled.wait(faults.delay_s):
            return Cancelled()
        if faults.fail(op):
            self.pages.spoil(op)
            return Failed(f"fetch #{op.number} was made to fail")
        tokens = op.stop - op.start
        if faults.short(op):
            self.copy(job, tokens // 2)
            return Failed(f"short read: {tokens // 2} of {tokens} tokens")
        self.copy(job)
        return self.verdict(job)

    def reach(self, record: Record) -> Source:
        """Return the publisher of `record`; raise PeerLost when it is not reached."""
        raise NotImplementedError

    def source_of(self, job: Job) -> Source:
        """Return the publisher of a fetch, reached once."""
        if job.source is None:
            job.source = self.reach(job.op.record)
            if job.cancelled.is_set():
                job.source.interrupt()
        return job.source

    def copy(self, job: Job, tokens: int | None = None) -> None:
        """Copy the first `tokens` tokens of a fetch (None: all), or less once it is cancelled.

        Raises
        ------
        PeerLost
            When the publisher is not reached or goes away meanwhile.
        PagesDiffer
            When its bytes mean something else.
        """
        op, source = job.op, self.source_of(job)
        theirs = source.open()
        if not self.pages.fits(theirs):
            raise PagesDiffer(op.record.address, theirs, self.pages)
        source.check()
        for _ in self.pages.copy(theirs, op, op.stop if tokens is None else min(op.start + tokens, op.stop)):
            source.check()
            if job.cancelled.is_set():
                break
        if self.pages.device.type == "cuda":
            torch.cuda.current_stream(self.pages.device).synchronize()

    def verdict(self, job: Job) -> Outcome:
        """Ask the publisher whether what was copied is what it had published."""
        record = job.op.record
        if job.cancelled.is_set():
            return Cancelled()
        if not self.source_of(job).holds(record.incarnation, job.op.fetch.stream.label, record.epoch):
            return Failed(f"{record.address!r} changed the content during the copy (epoch {record.epoch} is over)")
        return Landed()


def unique_address(name: str) -> str:
    """Return an address that no other life of a process on this machine has.

    Incarnations and epochs begin anew in every process, so an address that outlives one would let a record of the old
    life be confirmed by the new one.
    """
    return f"{name}-{os.getpid()}-{time.monotonic_ns()}"
