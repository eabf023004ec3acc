"""KVManager: one lock around a State, an outbox, and the verbs over a Backend."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

import attrs

from kvstate import invariants, view
from kvstate.backend import Backend, Cancelled, Failed, Landed, Outcome, Transport
from kvstate.errors import LockHeld, Poisoned, Refused, SubmitError
from kvstate.explain import Explanation, explain, explain_victim
from kvstate.ops import FetchBegin, FetchEnd, Op, Plan, StepBegin, StepEnd
from kvstate.ordering import Clock
from kvstate.prefix import CacheEvent, Key
from kvstate.refusals import ManagerClosed, ManagerPoisoned, Refusal
from kvstate.state import Claim, Fetch, Lease, OffloadClaim, ReloadClaim, State
from kvstate.trace import Event
from kvstate.transitions import leaving, lifecycle, offload, prefix, reload, retrieve, step
from kvstate.transitions.lifecycle import Emptied, Ingested
from kvstate.transitions.offload import Abandoned, Offloaded
from kvstate.transitions.prefix import Keyed
from kvstate.transitions.reload import Reloaded
from kvstate.transitions.retrieve import Readiness, Retrieval, Snapshot
from kvstate.transitions.step import Aborted, Committed
from kvstate.types import MAIN, Geometry, Publication, RequestConfig, Step
from kvstate.view import StateView

T = TypeVar("T")

_ENDINGS = frozenset(
    {"launch_exit", "abort", "abandon_offload", "abandon_reload", "landed", "failed", "cancelled", "op_failed"}
)
"""What a closed manager still does: end what was running when it was closed."""

_AT_ONCE = frozenset({"launch_enter", "launch_exit"})
"""What cannot wait for the end of a batch: the model runs between them, behind what the first and before the second."""


class Launch:
    """``with manager.launch(plan):`` the model runs inside; an exception aborts the lease at exit.

    Raises
    ------
    Refused
        On entry, when the plan is stale or an older step on one of its streams was not launched.
    SubmitError
        On entry, when the copies of a pre-fork could not be submitted; the lease is aborted.
    """

    __slots__ = ("_manager", "plan")

    def __init__(self, manager: KVManager, plan: Plan) -> None:
        self._manager = manager
        self.plan = plan

    def __enter__(self) -> Plan:
        begun = self._manager.launch_enter(self.plan)
        if isinstance(begun, Refusal):
            raise Refused(begun)
        lease = self.plan.lease
        if lease.failure is not None:
            self._manager.abort(lease)
            self._manager.launch_exit(lease)
            raise SubmitError(lease.failure)
        return self.plan

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self._manager.abort(self.plan.lease)
        self._manager.launch_exit(self.plan.lease)


class KVManager:
    """A paged KV cache driven by several threads.

    Parameters
    ----------
    geometry
        Sizes; see Geometry.
    backend
        Does the copies; see kvstate.backend.
    transport
        Does the fetches of `claim_retrieve`; without one, nothing can be retrieved.
    address
        What other managers use to reach this one, and how it knows its own publications; unique unless given.
    rank, world_size
        Of this worker in its tensor-parallel group.
    debug
        Check every promise after every transition. None takes the environment variable ``KVSTATE_DEBUG``.
    trace
        A list that gets one Event per critical section; None costs nothing.
    events
        A list that gets every change of what the prefix cache can find (`kvstate.prefix`), in order; None costs
        nothing.
    clock
        Seconds, for the age of claims.

    Notes
    -----
    Every verb returns its outcome or a Refusal. Blocking verbs raise LockHeld when the calling thread holds a lock of
    the manager.
    """

    # The one state lock. It guards the State and all that hangs from it (streams, rows, leases, claims, arenas, outbox)
    # and nothing else: under it there is no device, no waiting, no logging, no callback and no user code. It is an
    # RLock because that one knows its owner: what must not start under it can say so. Copies run outside: ops are taken
    # from the outbox and submitted under the submission lock, which is always taken first (submission → state), so
    # they reach the backend in the order of their numbers.

    def __init__(
        self,
        geometry: Geometry,
        backend: Backend,
        *,
        transport: Transport | None = None,
        address: str | None = None,
        rank: int = 0,
        world_size: int = 1,
        debug: bool | None = None,
        trace: list[Event] | None = None,
        events: list[CacheEvent] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lock = threading.RLock()
        self._submission = threading.RLock()
        self.geometry = geometry
        self.backend = backend
        self.transport = transport
        self.address = address if address is not None else f"{geometry.name}-{uuid.uuid4().hex[:12]}"
        self._state = State(geometry, self.address, rank, world_size)
        for pool in self._state.device.pools:
            pool.events = events
        self._clock = clock
        self._trace = trace
        self._debug = _debug_wanted() if debug is None else debug
        self._before: StateView | None = view.view(self._state) if self._debug else None
        self._watched = self._debug or trace is not None
        self._dead: Refusal | None = None
        self._closed = False
        self._released = False
        # Threads inside `batch`: what they emit waits for its end, or for another thread's submission.
        self._batching: set[int] = set()

    # -- the critical section

    def _locked(self, verb: str, transition: Callable[..., T], *args: Any) -> T | Refusal:
        """Run one transition under the lock, then hand what it emitted to the backend."""
        if self._lock._is_owned():  # type: ignore[attr-defined]
            raise LockHeld("a verb was called under the state lock of its manager; release it first")
        with self._lock:
            if self._dead is not None and not (self._closed and verb in _ENDINGS):
                return self._named(self._dead)
            result = transition(self._state, *args)
            if self._watched:
                self._watch(verb, args, result)
            emitted = bool(self._state.outbox)
        if emitted and (verb in _AT_ONCE or not self._in_batch()):
            self._drain()
            if self._dead is not None and not self._closed:
                return self._named(self._dead)
        return self._named(result) if isinstance(result, Refusal) else result

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Submit what this thread's calls emit inside together, at the end: the copies of several claims, say.

        Commit those claims behind the block. What cannot wait does not: the commit of a claim, a launch
        and a publish submit what was emitted so far. Of nested blocks the outermost counts.

        Raises
        ------
        Poisoned
            At the end, when the device failed.
        """
        me = threading.get_ident()
        outermost = me not in self._batching
        self._batching.add(me)
        try:
            yield
        finally:
            if outermost:
                self._batching.discard(me)
                self._drain()

    def _in_batch(self) -> bool:
        return bool(self._batching) and threading.get_ident() in self._batching

    def _named(self, refusal: Refusal) -> Refusal:
        return attrs.evolve(refusal, manager=self.geometry.name)

    def _watch(self, verb: str, args: tuple[Any, ...], result: Any) -> None:
        if self._trace is not None:
            self._trace.append(Event(verb, args, result))
        if self._debug:
            now = view.view(self._state)
            invariants.check(now, self._before, verb)
            self._before = now

    def _drain(self) -> None:
        """Submit the outbox in number order. When it returns, everything emitted before the call was submitted."""
        with self._submission:
            while True:
                with self._lock:
                    ops = self._state.outbox
                    self._state.outbox = []
                if not ops:
                    return
                for place, op in enumerate(ops):
                    try:
                        self._submit(op)
                    except BaseException:
                        with self._lock:
                            self._state.outbox = ops[place + 1 :] + self._state.outbox
                        raise

    def _submit(self, op: Op) -> None:
        if self._dead is not None and not self._closed:
            return
        try:
            self.backend.submit(op)
            if isinstance(op, FetchBegin):
                if self.transport is None:
                    raise SubmitError("this manager has no transport")
                self.transport.start(op)
        except SubmitError as error:
            if isinstance(op, (StepEnd, FetchEnd)):
                self._poison(error)
                raise Poisoned(f"{op!r} records what has happened, it cannot fail") from error
            self.backend.skip(op)
            with self._lock:
                self._fail(op, str(error))
        except Exception as error:
            self._poison(error)
            raise Poisoned(f"the device failed after a submit ({error}); build a new manager") from error
        except BaseException as error:
            # Interrupted: nobody knows whether the op was submitted, and the ops behind it were not.
            self._poison(error)
            raise
        else:
            if isinstance(op, FetchBegin):
                self._started(op.fetch)

    def _started(self, fetch: Fetch) -> None:
        """Note that the transport knows a fetch: only now can it be told of a cancel, perhaps asked for already."""
        with self._lock:
            fetch.started = True
        self._tell_cancels()

    def _tell_cancels(self) -> None:
        with self._lock:
            told = [
                claim
                for claim in self._state.claims.values()
                if isinstance(claim, Fetch) and claim.cancel_requested and claim.started and not claim.cancel_told
            ]
        if self.transport is not None:
            for fetch in told:
                self.transport.cancel(fetch)
                with self._lock:
                    fetch.cancel_told = True

    def _fail(self, op: Op, error: str) -> None:
        lifecycle.op_failed(self._state, op, error)
        if self._watched:
            self._watch("op_failed", (op, error), None)

    def _poison(self, error: BaseException) -> None:
        with self._lock:
            closed, self._closed = self._closed, False
            self._dead = ManagerPoisoned(error=f"{type(error).__name__}: {error}")
        self.backend.lose(str(self._dead))
        if closed:
            self._release()

    def _unlocked(self) -> None:
        for lock in (self._lock, self._submission):
            if lock._is_owned():  # type: ignore[attr-defined]
                raise LockHeld("a blocking verb was called under a lock of the manager; release it first")

    # -- requests

    def ingest(self, request: str, config: RequestConfig | None = None) -> Ingested | Refusal:
        """Make a request live, or join the live one. Refused: ConfigConflict."""
        return self._locked("ingest", lifecycle.ingest, request, config)

    def reset(self, request: str, free: bool = True) -> Emptied | Refusal:
        """Erase a request's content; ``free=False`` keeps the pages that nobody else owns. Refused: UnknownRequest."""
        done = self._locked("reset", lifecycle.reset, request, free)
        self.poll()
        return done

    def remove(self, request: str) -> Emptied | Refusal:
        """End a request, in whatever it is doing. Refused: UnknownRequest."""
        done = self._locked("remove", lifecycle.remove, request)
        self.poll()
        return done

    # -- steps

    def admit(self, step_: Step) -> Lease | Refusal:
        """Reserve everything a step needs, or refuse and hold nothing."""
        admitted = self._locked("admit", step.admit, step_)
        if isinstance(admitted, Refusal) and self.poll():
            admitted = self._locked("admit", step.admit, step_)
        return admitted

    def probe(self, step_: Step, leaving: bool = False) -> Refusal | None:
        """Return what `admit` would refuse the step with, or None; nothing changes.

        Parameters
        ----------
        leaving
            Answer as if every open offload claim had committed and every lease with void rows had ended.
        """
        with self._lock:
            if self._dead is not None:
                return self._named(self._dead)
            refusal = step.probe(self._state, step_, leaving)
            return refusal if refusal is None else self._named(refusal)

    def plan(self, lease: Lease) -> Plan | Refusal:
        """Fix the views and addresses of an admitted step. Refused: StalePlan, once per change."""
        return self._locked("plan", step.plan, lease)

    def launch(self, plan: Plan) -> Launch:
        """Return the context in which the model runs."""
        return Launch(self, plan)

    def launch_enter(self, plan: Plan) -> StepBegin | Refusal:
        """Enter a launch; see `launch`."""
        return self._locked("launch_enter", step.launch_enter, plan)

    def launch_exit(self, lease: Lease) -> StepEnd | Aborted | Refusal:
        """Leave a launch: the step takes its number and its event is recorded, in that order."""
        left = self._locked("launch_exit", step.launch_exit, lease)
        if self._closed:
            self._release()
        return left

    def commit(self, lease: Lease, accepted: Sequence[int] | None = None) -> Committed | Refusal:
        """Commit a launched step: lengths and tables change here. Void segments are dropped, and reported.

        Parameters
        ----------
        accepted
            Tokens stored per segment, padding included; None: all of them.

        Raises
        ------
        AcceptedMismatch
            When `accepted` does not fit the step; nothing was changed.
        """
        return self._locked("commit", step.commit, lease, None if accepted is None else tuple(accepted))

    def abort(self, lease: Lease) -> Aborted | Refusal:
        """Give back what a lease reserved. Refused: LeaseEnded."""
        return self._locked("abort", step.abort, lease)

    # -- offload and reload

    def claim_offload(self, request: str, discard_in_flight: bool = False) -> OffloadClaim | Refusal:
        """Claim a request for offload; its copy was submitted, or failed (`claim.failure`), when this returns.

        End it by `commit_claim` or `abandon`; `offload` does both.
        """
        self.poll()
        return self._locked("claim_offload", offload.claim_offload, request, discard_in_flight, self._clock())

    def claim_reload(self, request: str, extra: Step | None = None) -> ReloadClaim | Refusal:
        """Claim a request for reload, with the pages that the step `extra` will ask for on it; see `claim_offload`."""
        self.poll()
        return self._locked("claim_reload", reload.claim_reload, request, extra, self._clock())

    def commit_claim(self, claim: OffloadClaim | ReloadClaim) -> Offloaded | Reloaded | Abandoned | Refusal:
        """Commit an offload or reload. Refused: CopyFailed, ClaimEnded. A fetch commits by itself, when it lands."""
        if self._in_batch():
            self._drain()  # whether its copy was submitted must be known
        if isinstance(claim, OffloadClaim):
            return self._locked("commit_offload", offload.commit_offload, claim)
        if isinstance(claim, ReloadClaim):
            return self._locked("commit_reload", reload.commit_reload, claim)
        raise TypeError(f"{claim!r} cannot be committed: a fetch ends by what its transport says, see readiness")

    def abandon(self, claim: Claim) -> Abandoned | Refusal:
        """Give up a claim: everything is as before it. A fetch is given up once its transport confirms the cancel.

        Refused: ClaimEnded.
        """
        if isinstance(claim, OffloadClaim):
            return self._locked("abandon_offload", offload.abandon_offload, claim)
        if isinstance(claim, ReloadClaim):
            return self._locked("abandon_reload", reload.abandon_reload, claim)
        given_up = self._locked("abandon_fetch", retrieve.abandon_fetch, claim)
        self.poll()
        return given_up

    def offload(self, request: str, discard_in_flight: bool = False) -> Offloaded | Abandoned | Refusal:
        """Offload a request: claim, copy, commit. Whatever fails, the claim has ended when this returns.

        Raises
        ------
        LockHeld
            When the calling thread holds a lock of the manager.
        Poisoned
            When the device fails; then nothing ends any more.
        """
        self._unlocked()
        claim = self.claim_offload(request, discard_in_flight)
        return claim if isinstance(claim, Refusal) else self._finish(claim)

    def reload(self, request: str, extra: Step | None = None) -> Reloaded | Abandoned | Refusal:
        """Reload a request: claim, copy, commit, with room for the step `extra`. Raises as `offload` does.

        Whatever fails, the claim has ended when this returns.
        """
        self._unlocked()
        claim = self.claim_reload(request, extra)
        return claim if isinstance(claim, Refusal) else self._finish(claim)

    def _finish(self, claim: OffloadClaim | ReloadClaim) -> Any:
        try:
            return self.commit_claim(claim)
        finally:
            if claim.open:
                self.abandon(claim)

    def is_offloaded(self, request: str) -> bool:
        """Tell whether a request is off the device, from claim_offload until a reload commits: a gate for admission."""
        with self._lock:
            return offload.is_offloaded(self._state, request)

    def reclaimable(self, request: str) -> int:
        """Return the device pages that an offload of `request` would free now."""
        self.poll()
        with self._lock:
            return offload.reclaimable(self._state, request)

    def gain(self, request: str) -> int:
        """Return the device pages that nobody would own if `request` left now and its steps in flight had ended."""
        self.poll()
        with self._lock:
            return leaving.gain(self._state, request)

    def offload_order(self) -> tuple[str, ...]:
        """Return the requests that an offload would gain from: higher `offload_priority` first, then the newest."""
        self.poll()
        with self._lock:
            ranked = sorted(self._state.requests.values(), key=lambda r: (-r.config.offload_priority, -r.incarnation))
            return tuple(r.id for r in ranked if offload.reclaimable(self._state, r.id))

    # -- prefix cache

    def match(self, keys: Sequence[Key]) -> int:
        """Return how many leading pages of `keys` a request could start on now (``Segment.prefix``); claims nothing.

        Parameters
        ----------
        keys
            Of consecutive pages, from the first on; see `kvstate.prefix.page_keys`.
        """
        with self._lock:
            return 0 if self._dead is not None else prefix.match(self._state, keys)

    def key(self, request: str, tokens: Sequence[int], label: str = MAIN) -> Keyed | Refusal:
        """Let other requests find the stored pages that hold `tokens`, which continue the stream's keyed ones.

        Refused: NotStored, when there are more tokens than are stored; UnknownRequest; and where the stream is not on
        the device.
        """
        return self._locked("key", prefix.key, request, tuple(tokens), label)

    def reset_prefix_cache(self) -> int | Refusal:
        """Forget every key: call this when the weights have changed. Returns how many pages could be found."""
        return self._locked("reset_prefix_cache", prefix.reset_prefix_cache)

    # -- publish and retrieve

    def publish(self, request: str) -> Publication | Refusal | None:
        """Say what other workers may read of `request`: bytes the host has seen complete. None when it is unknown.

        Raises
        ------
        LockHeld
            When the calling thread holds a lock of the manager.
        Poisoned
            When the device fails while this waits.
        """
        self._unlocked()
        self.poll()
        noted = self.snapshot(request)
        if not isinstance(noted, Snapshot):
            return noted
        if self._in_batch():
            self._drain()  # what it waits for must have been submitted
        try:
            self.backend.wait(noted.after)
        except Exception as error:
            self._poison(error)
            raise
        return self.publish_noted(noted)

    def snapshot(self, request: str) -> Snapshot | Refusal | None:
        """Note what `request` could publish, and what the host must see complete first."""
        return self._locked("snapshot", retrieve.snapshot, request)

    def publish_noted(self, noted: Snapshot) -> Publication | Refusal | None:
        """Publish a snapshot whose `after` the host has seen complete."""
        return self._locked("publish", retrieve.publish, noted)

    def claim_retrieve(
        self, request: str, publication: Publication | None, labels: Sequence[str] | None = None
    ) -> Retrieval | Refusal:
        """Start fetching what `publication` has beyond this request's own tokens; see `readiness`."""
        self.poll()
        return self._locked(
            "claim_retrieve", retrieve.claim_retrieve, request, publication,
            None if labels is None else tuple(labels), self._clock(),
        )  # fmt: skip

    def readiness(self, request: str, labels: Sequence[str] | None = None) -> Readiness | Refusal:
        """Say whether the needed labels are ready, pending or failed."""
        self.poll()
        with self._lock:
            if self._dead is not None:
                return self._named(self._dead)
            return retrieve.readiness(self._state, request, labels)

    def cancel_retrieve(self, request: str) -> tuple[Fetch, ...] | Refusal:
        """Ask the transport to cancel a request's fetches; each is pending until the cancel is confirmed."""
        asked = self._locked("cancel_retrieve", retrieve.cancel_retrieve, request)
        self.poll()
        return asked

    def epoch_holds(self, incarnation: int, label: str, epoch: int) -> bool:
        """Tell whether what was published as (incarnation, epoch) still holds; a reader asks after its copy."""
        with self._lock:
            return self._dead is None and retrieve.epoch_holds(self._state, incarnation, label, epoch)

    def poll(self) -> tuple[tuple[Fetch, Outcome], ...]:
        """Take note of fetches that ended, tell the transport of cancels; return what ended and how.

        Every verb that a scheduler may stand still on calls this.
        """
        if self.transport is None:
            return ()
        self._tell_cancels()
        ended = self.transport.poll()
        for fetch, outcome in ended:
            if isinstance(outcome, Landed):
                self._locked("landed", retrieve.landed, fetch)
            elif isinstance(outcome, Failed):
                self._locked("failed", retrieve.failed, fetch, outcome.error)
            elif isinstance(outcome, Cancelled):
                self._locked("cancelled", retrieve.cancelled, fetch)
        if ended and self._closed:
            self._release()
        return tuple(ended)

    # -- the whole

    def claims(self, older_than_s: float = 0.0) -> tuple[Claim, ...]:
        """Return the open claims and fetches that are at least `older_than_s` seconds old, oldest first."""
        now = self._clock()
        with self._lock:
            return tuple(c for c in self._state.claims.values() if now - c.opened_s >= older_than_s)

    def pages_free(self) -> dict[str, tuple[int, ...]]:
        """Return the free pages per tier and group; of several groups, those that each alone could be granted."""
        self.poll()
        with self._lock:
            return {arena.tier.value: arena.free() for arena in (self._state.device, self._state.host)}

    def pages_available(self) -> dict[str, tuple[int, ...]]:
        """Return the pages per tier that each group alone could be granted: free ones, and cached ones in their way."""
        self.poll()
        with self._lock:
            return {arena.tier.value: arena.available() for arena in (self._state.device, self._state.host)}

    def view(self) -> StateView:
        """Return everything the manager knows, as one value."""
        with self._lock:
            return view.view(self._state)

    def explain(self, what: Refusal | str) -> Explanation:
        """Say in words why something was refused just now, or what an eviction of a request (by its id) would bring."""
        now, groups = self.view(), [group.name for group in self.geometry.groups]
        return explain_victim(now, what, groups) if isinstance(what, str) else explain(now, what, groups)

    def completed(self) -> Clock:
        """Return what the host has seen complete."""
        return self.backend.completed()

    @property
    def supports_offload(self) -> bool:
        """True when there is a host pool."""
        return self.geometry.host_pages > 0

    def clear(self) -> None:
        """End every request, lease and claim. What a running launch or fetch holds returns when it ends."""
        self._locked("clear", lifecycle.clear)
        self.poll()

    def close(self) -> None:
        """Clear and refuse everything from then on. A second call changes nothing.

        The backend is released at once, or as soon as the last running launch and fetch have ended: until then they
        may write its memory, and may still be ended (`launch_exit`, `poll`).
        """
        self._unlocked()
        with self._lock:
            if self._closed:
                return
            if self._dead is None:
                self._dead = ManagerClosed()
                self._closed = True
                cleared = lifecycle.clear(self._state)
                if self._watched:
                    self._watch("clear", (), cleared)
        try:
            self._drain()
            self.poll()
        finally:
            self._release()

    def _release(self) -> None:
        """Release the backend: of a closed manager once nothing runs that may write it, of a poisoned one at once."""
        with self._lock:
            idle = not self._state.leases and not self._state.claims
            if self._released or self._dead is None or (self._closed and not idle):
                return
            self._released = True
        self.backend.close()


def _debug_wanted() -> bool:
    """Read the environment variable KVSTATE_DEBUG."""
    value = os.environ.get("KVSTATE_DEBUG", "").strip().lower()
    if value in ("", "0", "false", "no", "off"):
        return False
    if value in ("1", "true", "yes", "on"):
        return True
    raise ValueError(f"KVSTATE_DEBUG is {value!r}; set it to 1 or 0")


def admit_all(wanted: Sequence[tuple[KVManager, Step]]) -> tuple[Lease, ...] | Refusal:
    """Admit one step on each of several managers (self and cross attention), on all or on none.

    Returns
    -------
    The leases in the order given, or the first refusal; then the leases already admitted were aborted.
    """
    leases: list[tuple[KVManager, Lease]] = []
    refusal: Refusal | None = None
    try:
        for manager, wanted_step in wanted:
            lease = manager.admit(wanted_step)
            if isinstance(lease, Refusal):
                refusal = lease
                break
            leases.append((manager, lease))
        else:
            return tuple(lease for _, lease in leases)
    finally:
        if len(leases) < len(wanted):
            for other, admitted in reversed(leases):
                other.abort(admitted)
    return refusal
