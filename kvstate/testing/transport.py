"""Transports between in-memory backends: one that moves when a test says so, one with a thread of its own.

Both copy tokens from the publisher's pages into the consumer's and then ask the publisher whether the epoch still
holds. A fetch that fails leaves garbage in the consumer's pages on purpose.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType

import attrs

from kvstate.backend import Cancelled, Failed, Landed, Outcome
from kvstate.errors import SubmitError
from kvstate.ops import FetchBegin
from kvstate.state import Fetch
from kvstate.testing.backends import StampedBackend
from kvstate.testing.memory import GARBAGE


def _no(_: FetchBegin) -> bool:
    return False


EpochHolds = Callable[[int, str, int], bool]
"""(incarnation, label, epoch) → whether pages published so still hold that content."""


@attrs.frozen(eq=False)
class Peer:
    """A manager that others reach: its pages, and whom to ask after a copy."""

    backend: StampedBackend
    holds: EpochHolds


class Network:
    """Peers by address."""

    def __init__(self) -> None:
        self._peers: dict[str, Peer] = {}

    def join(self, address: str, backend: StampedBackend, holds: EpochHolds) -> None:
        """Make a manager reachable under `address`; a second one takes the place of the first."""
        self._peers[address] = Peer(backend, holds)

    def leave(self, address: str) -> None:
        """Make `address` unreachable: fetches from it fail."""
        self._peers.pop(address, None)

    def find(self, address: str) -> Peer | None:
        """Return who is reached at `address`."""
        return self._peers.get(address)


@attrs.frozen(eq=False)
class _Copier:
    """Moves the tokens of one fetch from the publisher's pages into the consumer's."""

    network: Network
    target: StampedBackend
    op: FetchBegin

    @classmethod
    def of(cls, network: Network, address: str, op: FetchBegin) -> _Copier:
        """Return the copier of `op` for the consumer at `address`."""
        peer = network.find(address)
        if peer is None:
            raise SubmitError(f"the consumer {address!r} has not joined the network, so #{op.number} cannot start")
        return cls(network, peer.backend, op)

    def wait(self) -> None:
        """Wait for what the fetch follows."""
        self.target.wait(self.op.after)

    def copy(self, tokens: int | None = None) -> Failed | None:
        """Copy the first `tokens` tokens (None: all), of those each group holds; return why that is impossible."""
        self.wait()
        op = self.op
        peer = self.network.find(op.record.address)
        if peer is None:
            return self._unreached()
        stop = op.stop if tokens is None else min(op.start + tokens, op.stop)
        for group, start, base in self._places():
            if start < stop:
                stamps = peer.backend.load(group, op.record.pages[group], start, stop)
                self.target.store(group, op.tables[group], start - base, stamps)
        return None

    def _places(self) -> Iterator[tuple[int, int, int]]:
        """Yield the groups, and in each the first token that is fetched and the one that its table begins with."""
        op = self.op
        for group, first in enumerate(op.firsts):
            base = first * op.page_size
            yield group, max(op.start, base), base

    def spoil(self) -> None:
        """Write garbage to the first half of each group's tokens, at least to one."""
        self.wait()
        op = self.op
        for group, start, base in self._places():
            self.target.store(group, op.tables[group], start - base, [GARBAGE] * -(-(op.stop - start) // 2))

    def verdict(self) -> Outcome:
        """Ask the publisher whether what was copied is what it had published."""
        record = self.op.record
        peer = self.network.find(record.address)
        if peer is None:
            return self._unreached()
        if not peer.holds(record.incarnation, self.op.fetch.stream.label, record.epoch):
            return Failed(f"{record.address!r} changed the content during the copy (epoch {record.epoch} is over)")
        return Landed()

    def _unreached(self) -> Failed:
        return Failed(f"nobody is reached at {self.op.record.address!r}")


class StepTransport:
    """Fetches wait in `waiting`, oldest first; a test says what becomes of each.

    Parameters
    ----------
    network
        Where publishers are found.
    address
        Of the consumer, which joins the network before its first fetch.
    refuse
        Asked for each fetch; True makes its start fail.

    Attributes
    ----------
    waiting
        Fetches that were started and have not ended.
    cancels
        Those of them whose cancel was asked for.
    """

    def __init__(self, network: Network, address: str, *, refuse: Callable[[FetchBegin], bool] = _no) -> None:
        self.network = network
        self.address = address
        self.refuse = refuse
        self.waiting: list[Fetch] = []
        self.cancels: list[Fetch] = []
        self._copiers: dict[Fetch, _Copier] = {}
        self._outcomes: list[tuple[Fetch, Outcome]] = []

    def start(self, op: FetchBegin) -> None:
        """Let the fetch of `op` wait for a decision."""
        if self.refuse(op):
            raise SubmitError(f"#{op.number} FetchBegin was made to fail")
        self._copiers[op.fetch] = _Copier.of(self.network, self.address, op)
        self.waiting.append(op.fetch)

    def cancel(self, fetch: Fetch) -> None:
        """Note that the fetch is to end."""
        if fetch in self._copiers and fetch not in self.cancels:
            self.cancels.append(fetch)

    def poll(self) -> list[tuple[Fetch, Outcome]]:
        """Return the fetches that ended since the last call."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def copy(self, fetch: Fetch, tokens: int | None = None) -> None:
        """Copy the first `tokens` tokens (None: all); the fetch fails at once if its publisher is not reached."""
        failure = self._copier(fetch).copy(tokens)
        if failure is not None:
            self._end(fetch, failure)

    def finish(self, fetch: Fetch) -> None:
        """Ask the publisher about the epoch; the fetch lands, or fails."""
        self._end(fetch, self._copier(fetch).verdict())

    def fail(self, fetch: Fetch, error: str) -> None:
        """Fail the fetch, with garbage in its pages."""
        self._copier(fetch).spoil()
        self._end(fetch, Failed(error))

    def confirm_cancel(self, fetch: Fetch) -> None:
        """Confirm a cancel that was asked for."""
        if fetch not in self.cancels:
            raise ValueError(f"nobody asked for the cancel of {fetch!r}")
        self._copier(fetch).wait()
        self._end(fetch, Cancelled())

    def _copier(self, fetch: Fetch) -> _Copier:
        if fetch not in self._copiers:
            raise ValueError(f"{fetch!r} was not started here, or ended already")
        return self._copiers[fetch]

    def _end(self, fetch: Fetch, outcome: Outcome) -> None:
        del self._copiers[fetch]
        self.waiting.remove(fetch)
        if fetch in self.cancels:
            self.cancels.remove(fetch)
        self._outcomes.append((fetch, outcome))


@attrs.define(eq=False)
class _Job:
    """A fetch on its way: copied at `due_s`, or never."""

    copier: _Copier
    due_s: float | None
    cancelled: bool = False


class ThreadTransport:
    """One worker thread copies fetches as they become due. Use it in a ``with`` block, or close it.

    Parameters
    ----------
    network
        Where publishers are found.
    address
        Of the consumer, which joins the network before its first fetch.
    delay_s
        Between the start of a fetch and its copy.
    refuse, fail, short, never
        Asked for each fetch when it starts; True makes its start fail; makes it fail over garbage; makes it fail over
        the first half of its tokens; makes it wait for ever, so that only a cancel ends it.
    """

    def __init__(
        self,
        network: Network,
        address: str,
        *,
        delay_s: float = 0.0,
        refuse: Callable[[FetchBegin], bool] = _no,
        fail: Callable[[FetchBegin], bool] = _no,
        short: Callable[[FetchBegin], bool] = _no,
        never: Callable[[FetchBegin], bool] = _no,
    ) -> None:
        self.network = network
        self.address = address
        self.delay_s = delay_s
        self.refuse = refuse
        self.fail = fail
        self.short = short
        self.never = never
        self._jobs: dict[Fetch, _Job] = {}
        self._outcomes: list[tuple[Fetch, Outcome]] = []
        self._closed = False
        # Guards the three above. Not held while bytes move or a publisher is asked, which takes that one's own lock.
        self._changed = threading.Condition()
        self._worker = threading.Thread(target=self._work, name="kvstate-fetches", daemon=True)
        self._worker.start()

    def start(self, op: FetchBegin) -> None:
        """Hand the fetch of `op` to the worker."""
        if self.refuse(op):
            raise SubmitError(f"#{op.number} FetchBegin was made to fail")
        copier = _Copier.of(self.network, self.address, op)
        due_s = None if self.never(op) else time.monotonic() + self.delay_s
        with self._changed:
            if self._closed:
                raise SubmitError("the transport is closed")
            self._jobs[op.fetch] = _Job(copier, due_s)
            self._changed.notify_all()

    def cancel(self, fetch: Fetch) -> None:
        """Ask the worker to end the fetch."""
        with self._changed:
            job = self._jobs.get(fetch)
            if job is not None:
                job.cancelled = True
                self._changed.notify_all()

    def poll(self) -> list[tuple[Fetch, Outcome]]:
        """Return the fetches that ended since the last call."""
        with self._changed:
            outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def wait(self, count: int = 1, timeout_s: float = 60.0) -> bool:
        """Block until ``poll`` has `count` outcomes; return whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._outcomes) >= count, timeout_s)

    def close(self) -> None:
        """Stop the worker after the copy it is at; what has not ended then is confirmed as cancelled."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._worker.join()

    def __enter__(self) -> ThreadTransport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- the worker

    def _work(self) -> None:
        while True:
            job = self._next()
            if job is None:
                return
            outcome: Outcome
            try:
                outcome = self._run(job)
            except Exception as error:  # a worker that dies would leave its fetches pending for ever
                outcome = Failed(f"{type(error).__name__}: {error}")
            with self._changed:
                fetch = job.copier.op.fetch
                del self._jobs[fetch]
                self._outcomes.append((fetch, Cancelled() if job.cancelled else outcome))
                self._changed.notify_all()

    def _next(self) -> _Job | None:
        """Wait for a job that is cancelled or due; None when closed and nothing is left."""
        with self._changed:
            while True:
                if self._closed:
                    for job in self._jobs.values():
                        job.cancelled = True
                now_s = time.monotonic()
                waits_s = []
                for job in self._jobs.values():
                    if job.cancelled or (job.due_s is not None and job.due_s <= now_s):
                        return job
                    if job.due_s is not None:
                        waits_s.append(job.due_s - now_s)
                if self._closed:
                    return None
                self._changed.wait(min(waits_s, default=None))

    def _run(self, job: _Job) -> Outcome:
        copier, op = job.copier, job.copier.op
        if job.cancelled:
            copier.wait()
            return Cancelled()
        if self.fail(op):
            copier.spoil()
            return Failed(f"fetch #{op.number} was made to fail")
        if self.short(op):
            tokens = (op.stop - op.start) // 2
            return copier.copy(tokens) or Failed(f"short read: {tokens} of {op.stop - op.start} tokens")
        return copier.copy() or copier.verdict()
