"""Mutants: known bugs of real engines and broken promises, put into the core one at a time.

A mutant is a patch that a test applies and takes back; the core has no switch for any of them. `edit` changes exact
pieces of a function's source and gives the function that code, so everybody who imported it runs it; `wrap` puts
another function in its place wherever the core names it. Both fail loudly when the core has changed under them. The
checker itself (`kvstate.testing`, `kvstate_spec`) is never patched.
"""

from __future__ import annotations
import __future__

import builtins
import dis
import importlib
import inspect
import linecache
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import CodeType, FunctionType, ModuleType
from typing import Any

import attrs

from kvstate.manager import KVManager
from kvstate.ops import CopyOut, Plan
from kvstate.refusals import HostExhausted, Refusal, StreamBusy
from kvstate.state import Lease, State, Stream
from kvstate.testing.judge import EdgeJudge
from kvstate.testing.memory import MemoryBackend
from kvstate.testing.transport import Network, StepTransport
from kvstate.testing.walk import SIZES, Tally, walk
from kvstate.testing.world import Sizes, Violation
from kvstate.transitions import lifecycle, retrieve
from kvstate.transitions.retrieve import Retrieval
from kvstate.transitions.step import Aborted, Committed
from kvstate.types import Geometry, Publication, Segment, Step, StreamFork, StreamId
from tests.steps import store

Patch = Callable[[], AbstractContextManager[None]]

ONE_GROUP = tuple(sizes for sizes in SIZES if len(sizes.groups) == 1 and sizes.groups[0].window is None)
"""Worlds in which programs are quick: what is wrong with one group is wrong with several."""

WITNESSES = ("reference", "refusal", "promise", "oracle", "judge", "crash")
"""Who may object to a program of the walk, see `kvstate.testing.world.Violation`."""

# -- patches


def _find(path: str) -> Any:
    """Return what a dotted path names inside ``kvstate``."""
    found: Any = importlib.import_module("kvstate")
    for name in path.split("."):
        found = getattr(found, name) if hasattr(found, name) else importlib.import_module(f"{found.__name__}.{name}")
    return found


def core_modules() -> Iterator[ModuleType]:
    """Yield the modules of the core; the checker and the command line are left alone."""
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] == "kvstate" and not name.startswith(("kvstate.testing", "kvstate.cli")):
            yield module


def _code(function: FunctionType, source: str) -> CodeType:
    """Compile the source of a function and return its code, which must fit the function as it is."""
    flags = __future__.annotations.compiler_flag
    module = compile(textwrap.dedent(source), inspect.getfile(function), "exec", flags, dont_inherit=True)
    [code] = [c for c in module.co_consts if isinstance(c, CodeType) and c.co_name == function.__name__]
    assert code.co_freevars == function.__code__.co_freevars == (), f"{function.__qualname__} is a closure"
    inner = [code, *(c for c in code.co_consts if isinstance(c, CodeType))]
    names = {i.argval for one in inner for i in dis.get_instructions(one) if i.opname == "LOAD_GLOBAL"}
    unknown = names - vars(builtins).keys() - function.__globals__.keys()
    assert not unknown, f"{function.__qualname__} does not know {unknown}"
    return code


def edit(what: str | Callable[..., Any], *changes: tuple[str, str]) -> Patch:
    """Return the patch that replaces pieces of a function's source, each of which must be there exactly once.

    `what` is the function, or its path inside ``kvstate``.
    """

    @contextmanager
    def patched() -> Iterator[None]:
        function = _find(what) if isinstance(what, str) else what
        assert isinstance(function, FunctionType), f"{what} is not a function in Python"
        source = inspect.getsource(function)
        for old, new in changes:
            found = source.count(old)
            assert found == 1, f"{old!r} is {found} times in {function.__qualname__}: it changed, adapt the mutant"
            source = source.replace(old, new)
        original = function.__code__
        function.__code__ = _code(function, source)
        try:
            yield
        finally:
            function.__code__ = original

    return patched


def off(path: str, statement: str) -> Patch:
    """Return the patch under which a function does everything but `statement`."""
    return edit(path, (statement, "pass"))


def wrap(path: str, make: Callable[[Any], Any]) -> Patch:
    """Return the patch that puts ``make(function)`` in a function's place: in modules, and in the table of verbs."""

    @contextmanager
    def patched() -> Iterator[None]:
        function = _find(path)
        replacement = make(function)
        places: list[tuple[dict[str, Any], str]] = []
        for module in core_modules():
            tables = [vars(module), *(value for value in vars(module).values() if type(value) is dict)]
            places += [(table, key) for table in tables for key, value in table.items() if value is function]
        assert places, f"nobody names {path}: the core changed, adapt the mutant"
        for table, key in places:
            table[key] = replacement
        try:
            yield
        finally:
            for table, key in places:
                table[key] = function

    return patched


def both(*patches: Patch) -> Patch:
    """Return the patch that applies several."""

    @contextmanager
    def patched() -> Iterator[None]:
        with ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch())
            yield

    return patched


# -- patches that need a function of their own


def _busy_by_flag() -> AbstractContextManager[None]:
    """Admit sets a flag on its streams, commit and abort clear it; offload asks the flag, not the leases."""
    flagged: set[Stream] = set()

    def admits(admit: Any) -> Any:
        def admit_and_flag(state: State, wanted: Step) -> Lease | Refusal:
            lease: Lease | Refusal = admit(state, wanted)
            if isinstance(lease, Lease):
                flagged.update(row.stream for row in lease.rows)
            return lease

        return admit_and_flag

    def ends(verb: Any) -> Any:
        def end_and_clear(state: State, lease: Lease, *args: Any) -> Any:
            done = verb(state, lease, *args)
            if isinstance(done, (Committed, Aborted)):
                flagged.difference_update(row.stream for row in lease.rows)
            return done

        return end_and_clear

    def asks(_: Any) -> Any:
        def flag_in_the_way(request: Any) -> Refusal | None:
            for stream in request.streams.values():
                if stream in flagged:
                    return StreamBusy(request=request.id, label=stream.label)
            return None

        return flag_in_the_way

    return both(
        wrap("transitions.step.admit", admits),
        wrap("transitions.step.commit", ends),
        wrap("transitions.step.abort", ends),
        wrap("transitions.claim.lease_in_the_way", asks),
    )()


def _full_host_pool_is_only_logged(claim_offload: Any) -> Any:
    def claims(state: State, request: str, *args: Any) -> Any:
        refusal = claim_offload(state, request, *args)
        if isinstance(refusal, HostExhausted):
            lifecycle.reset(state, request)
        return refusal

    return claims


def _landed_anyway(failed: Any) -> Any:
    return lambda state, fetch, error: retrieve.landed(state, fetch)


class _NoLock:
    """Looks like an RLock and lets everybody in."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def _is_owned(self) -> bool:
        return False


@contextmanager
def _no_lock() -> Iterator[None]:
    init = KVManager.__init__

    def unguarded(self: KVManager, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self._lock = _NoLock()  # type: ignore[assignment]

    KVManager.__init__ = unguarded  # type: ignore[method-assign]
    try:
        yield
    finally:
        KVManager.__init__ = init  # type: ignore[method-assign]


# -- programs by hand: what a verb that blocks does is no letter of the walk's alphabet


def _manager() -> KVManager:
    geometry = Geometry(pages=6, page_size=2, host_pages=6)
    return KVManager(geometry, MemoryBackend(geometry), debug=True)


def a_forward_that_raises() -> None:
    """The model raises inside ``with manager.launch(plan):``; the request can be evicted afterwards."""
    manager = _manager()
    manager.ingest("r")
    lease = manager.admit(Step([Segment("r", span=3)]))
    assert isinstance(lease, Lease)
    plan = manager.plan(lease)
    assert isinstance(plan, Plan)
    try:
        with manager.launch(plan):
            raise RuntimeError("the forward failed")
    except RuntimeError:
        pass
    assert not isinstance(manager.offload("r"), Refusal), "the request can never be evicted again"


def a_copy_that_fails() -> None:
    """The copy of an offload fails at submit; the blocking verb gives the claim up."""
    manager = _manager()
    manager.ingest("r")
    manager.backend.fail_next(CopyOut)  # type: ignore[attr-defined]
    assert isinstance(manager.offload("r"), Refusal)
    assert not manager.claims(), "the claim of the failed copy is open for ever"


def _fetching(debug: bool, *labels: str) -> tuple[KVManager, StepTransport, Retrieval]:
    """Return a manager, and its transport, that fetches three tokens of each label of a request from another one."""
    network = Network()
    managers = []
    for address in ("a", "b"):
        geometry = Geometry(pages=6, page_size=2, name=address)
        backend = MemoryBackend(geometry)
        transport = StepTransport(network, address)
        manager = KVManager(geometry, backend, transport=transport, address=address, debug=debug)
        network.join(address, backend, manager.epoch_holds)
        manager.ingest("r")
        managers.append((manager, transport))
    (publisher, _), (consumer, transport) = managers
    store(publisher, *(Segment("r", label, 3) for label in labels))
    published = publisher.publish("r")
    assert isinstance(published, Publication)
    started = consumer.claim_retrieve("r", published, labels=labels)
    assert isinstance(started, Retrieval)
    return consumer, transport, started


def a_decode_phase_after_a_fetch() -> None:
    """A fetch ends, and from then on nobody but admit is called."""
    consumer, transport, started = _fetching(True, "main")
    [fetch] = started.fetches
    transport.copy(fetch)
    transport.finish(fetch)
    assert isinstance(consumer.admit(Step([Segment("r")])), Lease), "the fetch that has ended is pending for ever"


def the_first_of_two_fetches_is_cancelled() -> None:
    """A request fetches two labels; the cancel of one is confirmed while the other still writes."""
    consumer, transport, started = _fetching(False, "main", "cfg")
    consumer.cancel_retrieve("r")
    transport.confirm_cancel(started.fetches[0])
    consumer.poll()
    assert consumer.pages_free()["device"] == (4,), "pages that a fetch still writes are free"


def a_source_that_leaves_behind_its_post_fork() -> None:
    """A page is copied by a post-fork, its stream is removed, and a reload fills the page: behind that copy."""
    geometry = Geometry(pages=4, page_size=2, host_pages=2)
    judge = EdgeJudge.of(geometry)
    manager = KVManager(geometry, MemoryBackend(geometry, judge=judge), debug=True)
    for request in ("r", "s", "t"):
        manager.ingest(request)
    store(manager, Segment("s", span=4))
    manager.offload("s")
    store(manager, Segment("r", span=3), forks=[StreamFork(StreamId("r"), StreamId("t"))])
    manager.remove("r")
    assert not isinstance(manager.reload("s"), Refusal)
    assert not judge.violations, judge.violations


# -- the registry


@attrs.frozen
class Mutant:
    """One bug.

    Attributes
    ----------
    id
        The row of `tests/bugs/` (or "promise", for one of the design that no row covers) and a word.
    what
        What the core does wrong, in a sentence.
    patch
        Puts it in.
    layers
        The witnesses of the random walk that may be first to object.
    seed, programs
        From this seed on, the walk must find it within so many programs.
    by_hand
        For verbs that block, which no walk calls, and where a short program says more: it must fail under the mutant.
        Then `layers` is empty.
    to_come
        The layer that can see it, where this part has none. Such a mutant is registered and not run.
    """

    id: str
    what: str
    patch: Patch
    layers: tuple[str, ...] = attrs.field(default="", converter=lambda names: tuple(names.split()))
    seed: int = 1
    programs: int = 100
    by_hand: Callable[[], None] | None = None
    to_come: str = ""

    @property
    def row(self) -> str:
        """The row of `tests/bugs/`, or "promise"."""
        return self.id.split("-")[0]


NOT_HERE = {
    "D7": "a plan uploads its tables in the GPU backend, which has mutants of its own",
}
"""MUTANT rows that the code so far cannot express."""

_IDENTITY = "if isinstance(stream.residency, Offloading) and stream.residency.claim is claim:"

MUTANTS: tuple[Mutant, ...] = (
    # -- offload, reload, removal
    Mutant(
        "O1-uncommitted",
        "a request is on the host, and can be reloaded, from the claim on",
        edit(
            "transitions.offload.claim_offload",
            ("stream.residency = Offloading(claim)", "stream.residency = OnHost(tuple(host), NOTHING, NOTHING)"),
        ),
        layers="reference",
    ),
    Mutant(
        "O2-names",
        "the late commit of an offload finds its streams by name",
        edit(
            "transitions.offload.commit_offload",
            (
                "stream = part.stream",
                "live = state.requests.get(claim.request.id)\n"
                "        stream = live.streams.get(part.stream.label, part.stream) if live else part.stream",
            ),
            (_IDENTITY, "if isinstance(stream.residency, (Offloading, OnDevice)):"),
        ),
        layers="reference promise",
    ),
    Mutant(
        "O2-identity",
        "claim identity off: the late commit of an offload acts on whatever its streams have become",
        edit("transitions.offload.commit_offload", (_IDENTITY, "if True:")),
        layers="reference promise",
    ),
    Mutant(
        "O2-reload",
        "claim identity off: the late commit of a reload acts on whatever its streams have become",
        edit(
            "transitions.reload.commit_reload",
            ("if isinstance(stream.residency, Reloading) and stream.residency.claim is claim:", "if True:"),
        ),
        layers="reference promise",
    ),
    Mutant(
        "O2-abandon",
        "claim identity off: the late abandon of an offload restores its streams although they were reset",
        edit("transitions.offload.abandon_offload", (_IDENTITY, "if True:")),
        layers="reference promise",
        seed=3,
        programs=600,
    ),
    Mutant(
        "O3-orphan",
        "an orphaned offload keeps its host pages",
        off("transitions.offload.commit_offload", "state.host.drop(part.host, copy)"),
        layers="promise",
        seed=4,
    ),
    Mutant(
        "O5-reset",
        "reset leaves host copies, and a reload brings erased content back",
        edit(
            "transitions.lifecycle.reset",
            (
                "for stream in list(found.streams.values()):",
                "for stream in [s for s in found.streams.values() if s.residency.name != 'OnHost']:",
            ),
        ),
        layers="reference oracle",
    ),
    Mutant(
        "O6-exception",
        "an exception in the forward leaves the launched lease open",
        off("manager.Launch.__exit__", "self._manager.abort(self.plan.lease)"),
        by_hand=a_forward_that_raises,
    ),
    Mutant(
        "O7-flag", "busy is a flag that any step's end clears, not a count of leases", _busy_by_flag, layers="reference"
    ),
    Mutant(
        "O7-newest",
        "a step counts as busy only once it is launched, so one that is planned ahead does not",
        edit(
            "transitions.claim.lease_in_the_way",
            ("if stream.rows:", "if any(row.lease.number for row in stream.rows):"),
        ),
        layers="reference",
    ),
    Mutant(
        "O7-off",
        "no lease check in claim_offload",
        edit("transitions.claim.lease_in_the_way", ("if stream.rows:", "if False:")),
        layers="reference",
    ),
    Mutant(
        "O8-commit",
        "commit applies segments that went void",
        edit(
            "transitions.step.commit",
            ("if row.void:", "if row.void and row.wide:"),
            ("del stream.rows[0]", "(stream.voided if row.void else stream.rows).remove(row)"),
        ),
        layers="promise crash oracle",
    ),
    Mutant(
        "O8-void",
        "reset and remove leave the steps planned on a stream valid",
        off("transitions.leaving.empty", "void_from(stream, 0)"),
        layers="reference promise",
    ),
    Mutant(
        "O8-discard",
        "an offload that discards steps in flight leaves them valid",
        off("transitions.offload.claim_offload", "void_from(stream, 0)"),
        layers="promise",
    ),
    Mutant(
        "O9-half",
        "an offload moves the labels that fit and leaves the others",
        edit(
            "transitions.offload.claim_offload",
            (
                "streams = list(found.streams.values())",
                "room = state.host.free()[0]\n"
                "    streams = []\n"
                "    for stream in found.streams.values():\n"
                "        room -= content_pages(state, stream)\n"
                "        if room >= 0 or not streams:\n"
                "            streams.append(stream)",
            ),
        ),
        layers="reference promise",
        seed=6,
    ),
    Mutant(
        "O10-commit",
        "commit does not look whether the copy failed",
        edit("transitions.claim.not_committable", ("claim.failure is not None", "False")),
        layers="reference",
    ),
    Mutant(
        "O10-unnoted",
        "a copy that failed at submit is noted nowhere",
        off("transitions.lifecycle.op_failed", "owner.failure = error"),
        layers="oracle",
    ),
    Mutant(
        "O10-abandon",
        "an offload given up because its copy failed leaves its streams off the device",
        edit("transitions.offload.abandon_offload", (_IDENTITY, f"{_IDENTITY[:-1]} and claim.failure is None:")),
        layers="promise",
    ),
    Mutant(
        "O10-reload",
        "a reload given up because its copy failed keeps its device pages",
        edit(
            "transitions.reload.abandon_reload",
            ("state.device.drop(part.device, copy)", "claim.failure or state.device.drop(part.device, copy)"),
        ),
        layers="promise",
    ),
    Mutant(
        "O10-finish",
        "the blocking offload leaves the claim of a failed copy open",
        edit("manager.KVManager._finish", ("if claim.open:", "if False:")),
        by_hand=a_copy_that_fails,
    ),
    Mutant(
        "O12-logged",
        "a full host pool is reported, and the device pages leave all the same",
        wrap("transitions.offload.claim_offload", _full_host_pool_is_only_logged),
        layers="refusal",
    ),
    # -- ordering on the device
    Mutant(
        "D1-copy-out",
        "a copy out does not follow the step that wrote its pages",
        off("transitions.offload.claim_offload", "after = merge(after, stream.written)"),
        layers="judge",
    ),
    Mutant(
        "D1-fork",
        "what a post-fork copied is not noted as written",
        off(
            "transitions.fork.apply_post_forks",
            "fork.target.stream.written = merge(fork.target.stream.written, at(Queue.COMPUTE, op.number))",
        ),
        layers="judge",
        seed=2,
    ),
    Mutant(
        "D2-grant",
        "a copy in does not follow what used its device pages before",
        off("transitions.reload.claim_reload", "after = merge(after, pool.fence_of(granted))"),
        layers="judge",
    ),
    Mutant(
        "D2-drop",
        "a dropped page forgets its owner's uses",
        edit("arena.Pool.drop", ("merge(fence, uses)", "fence")),
        layers="judge",
    ),
    Mutant(
        "D2-reads",
        "a step that ends is no use of the pages it read",
        off("transitions.leaving.end_row", "stream.used = merge(stream.used, at(Queue.COMPUTE, lease.number))"),
        layers="judge",
    ),
    Mutant(
        "D2-fork",
        "the copy of a post-fork is no use of its source",
        off(
            "transitions.fork.apply_post_forks",
            "fork.source.stream.used = merge(fork.source.stream.used, at(Queue.COMPUTE, op.number))",
        ),
        by_hand=a_source_that_leaves_behind_its_post_fork,
    ),
    Mutant(
        "D2-fetch",
        "a fetch does not follow what used its pages before",
        off("transitions.retrieve._fetch", "after = merge(after, pool.fence_of(granted))"),
        layers="judge",
        seed=5,
    ),
    Mutant(
        "D2-landed",
        "nothing tells the order of ops that a fetch has ended",
        off(
            "transitions.retrieve._end",
            "state.outbox.append(FetchEnd(state.number(), NOTHING, fetch, fetch.op.number))",
        ),
        layers="judge",
    ),
    Mutant(
        "D3-step",
        "a step does not follow the copy out of the pages it enters",
        off(
            "transitions.reserve.Reservation._build_growth",
            "row.entered = merge(row.entered, pool.fence_of(table.part(covered, wanted)))",
        ),
        layers="judge",
    ),
    Mutant(
        "D3-released",
        "device pages are released as if the copy out had run",
        off("transitions.offload.commit_offload", "stream.used = merge(stream.used, copy)"),
        layers="judge",
    ),
    Mutant(
        "D4-host-grant",
        "a copy out does not follow what used its host pages before",
        off("transitions.offload.claim_offload", "after = merge(after, pool.fence_of(moved[group].values()))"),
        layers="judge",
    ),
    Mutant(
        "D4-host-released",
        "host pages are released as if the copy in had run",
        edit(
            "transitions.reload.commit_reload",
            ("merge(merge(before.written, before.used), copy)", "merge(before.written, before.used)"),
        ),
        layers="judge",
    ),
    Mutant(
        "D5-copy-in",
        "a step does not follow the copy in of what it reads",
        off("transitions.reload.commit_reload", "stream.written = merge(copy, claim.found)"),
        layers="judge",
    ),
    Mutant(
        "D6-orphan",
        "an orphaned reload releases its pages as if the copy in had run",
        edit(
            "transitions.reload.commit_reload",
            ("state.device.drop(part.device, copy)", "state.device.drop(part.device, NOTHING)"),
        ),
        layers="judge",
        seed=6,
        programs=600,
    ),
    Mutant(
        "D6-abandon",
        "an abandoned reload releases its pages as if the copy in had run",
        edit(
            "transitions.reload.abandon_reload",
            ("state.device.drop(part.device, copy)", "state.device.drop(part.device, NOTHING)"),
        ),
        layers="judge",
        seed=3,
        programs=600,
    ),
    Mutant(
        "D8-whole-page",
        "an offload copies the whole last page, not its committed tokens",
        edit("transitions.offload.claim_offload", ("pages[table[full]] = rest", "pages[table[full]] = size")),
        layers="judge",
    ),
    Mutant(
        "D10-last-owner",
        "only the last owner's uses are merged into the fence",
        edit("arena.Pool.drop", ("fences[page] = merged", "fences[page] = fence if left else merged")),
        layers="judge",
        seed=4,
    ),
    Mutant(
        "D11-grant",
        "a grant clears the fence",
        edit("arena.Pool.grant", ("owners[page] = 1", "owners[page], self.fences[page] = 1, NOTHING")),
        layers="promise",
    ),
    Mutant(
        "D11-read",
        "a fence is cleared by the first who asks for it",
        edit(
            "arena.Pool.fence_of",
            ("fence = fences[page]", "fence = fences[page]\n            fences[page] = NOTHING"),
        ),
        layers="promise",
    ),
    Mutant(
        "D11-abort",
        "a lease aborted before its launch gives pages back without their fences",
        edit(
            "transitions.leaving.give_back",
            (
                "release(state, stream, pages, set(above), stream.used if lease.number else NOTHING)",
                "release(state, stream, pages, set(above), stream.used if lease.number else NOTHING)\n"
                "            if not lease.number:\n"
                "                for page in pages[0]:\n"
                "                    state.device.pools[0].fences[page] = NOTHING",
            ),
        ),
        layers="promise",
    ),
    Mutant(
        "D11-failed",
        "pages granted for a copy in that failed are given back without their fences",
        edit(
            "transitions.reload.abandon_reload",
            (
                "state.device.drop(part.device, copy)",
                "state.device.drop(part.device, copy)\n"
                "        for page in part.device[0] if claim.failure else ():\n"
                "            state.device.pools[0].fences[page] = NOTHING",
            ),
        ),
        layers="promise",
    ),
    Mutant(
        "D11-launched",
        "a launched lease that is aborted gives pages back as if it had never run",
        edit("transitions.leaving.give_back", ("stream.used if lease.number else NOTHING", "NOTHING")),
        layers="judge",
    ),
    Mutant(
        "D12-stale",
        "launch does not look whether its plan is stale",
        edit("transitions.step.launch_enter", ("if lease.void != planned.void:", "if False:")),
        layers="reference",
    ),
    Mutant(
        "D13-youngest",
        "pages that leave wait for the youngest lease only",
        edit("transitions.leaving.leave", ("behind = open_on(stream) if", "behind = {max(open_on(stream))} if")),
        layers="reference promise",
        seed=4,
    ),
    Mutant(
        "D13-first",
        "held pages are dropped when the first of their leases ends",
        edit("transitions.leaving.stop_holding", ("if left.behind:", "if False:")),
        layers="reference promise",
    ),
    Mutant(
        "D13-uses",
        "held pages are dropped without the uses of the leases they waited for",
        off("transitions.leaving.stop_holding", "left.uses = merge(left.uses, at(Queue.COMPUTE, lease.number))"),
        layers="judge",
    ),
    Mutant(
        "D13-held",
        "held pages are dropped without the uses that the stream had when they left",
        edit(
            "transitions.leaving.release",
            ("tuple(list(own) for own in pages), uses", "tuple(list(own) for own in pages), NOTHING"),
        ),
        layers="judge",
    ),
    Mutant(
        "D14-number",
        "a step keeps the number of its launch's entry",
        edit("transitions.step.launch_exit", ("lease.number = state.number()", "lease.number = lease.began.number")),
        layers="judge",
    ),
    Mutant(
        "D14-order",
        "the manager submits the ops of one drain newest first",
        edit("manager.KVManager._drain", ("enumerate(ops):", "enumerate(ops[::-1]):")),
        layers="judge",
    ),
    # -- forks
    Mutant(
        "F1-stored",
        "reservation by simulation off: pages are counted from stored lengths",
        edit(
            "transitions.reserve.Reservation.segment",
            (
                "need = -(-draft.length // self.state.page_size) - draft.content",
                "size, stored = self.state.page_size, draft.stream.length\n"
                "        need = -(-(stored + segment.span) // size) - -(-stored // size)",
            ),
        ),
        layers="reference promise",
    ),
    Mutant(
        "F1-partial",
        "the page for the copy of a partly filled last page is not counted",
        edit("transitions.reserve.Reservation._pre_fork", ("self._ask(two, two.fork_granted)", "pass")),
        layers="reference crash",
    ),
    Mutant(
        "F2-chain",
        "a stream that this step opens is no source of a further fork",
        edit(
            "transitions.reserve.Reservation._exists",
            ("if draft is not None and (draft.opens or draft.exists):", "if False:"),
        ),
        layers="reference",
    ),
    Mutant(
        "F2-copy-pre",
        "the second of two pre-forks in a row copies from a page that the first has not filled yet",
        edit(
            "transitions.reserve.Reservation._build_pre_fork",
            ("self.origins[id(two), group] = origin", "pass"),
        ),
        layers="oracle",
        programs=600,
    ),
    Mutant(
        "F2-copy-post",
        "the second of two post-forks in a row copies from a page that the first has not filled yet",
        off("transitions.fork.apply_post_forks", "roots[group][page] = source_page"),
        layers="oracle",
        seed=3,
    ),
    Mutant(
        "F3-dropped",
        "a post-fork of a dropped source still runs",
        edit("transitions.step._surviving", ("if fork.source.void or fork.target.void", "if fork.target.void")),
        layers="oracle crash",
        seed=3,
    ),
    Mutant(
        "F3-chain",
        "a post-fork still runs when the one that gives its source was dropped",
        edit("transitions.step._surviving", (" or fork.source in dropped:", ":")),
        layers="oracle",
        seed=2,
    ),
    Mutant(
        "F3-pre",
        "what was pre-forked from a void row stays valid",
        edit(
            "transitions.leaving.void_from",
            ("if fork.pre and fork.source is row and not fork.target.void:", "if False:"),
        ),
        layers="reference oracle",
    ),
    Mutant(
        "F4-admit",
        "a pre-fork replaces the target's content when its step is admitted",
        edit(
            "transitions.reserve.Reservation._build_pre_fork",
            (
                "row.forked = True",
                "row.forked = True\n"
                "        row.stream.length, row.stream.released = length, row.released\n"
                "        row.stream.residency = type(row.stream.residency)(row.tables, 0)",
            ),
        ),
        layers="promise",
    ),
    Mutant(
        "F4-pending",
        "a cancelled post-fork stays pending on its target",
        off("transitions.leaving.end_row", "stream.pending_fork = None"),
        layers="reference",
    ),
    Mutant(
        "F5-shared",
        "sharing rule of reset off: it keeps pages that others own too",
        edit("transitions.lifecycle._owned_alone", ("if pool.owners[page] == 1", "if pool.owners[page]")),
        layers="reference promise",
    ),
    Mutant(
        "F5-pre-copy",
        "a pre-fork shares the partly filled last page instead of copying it",
        edit(
            "transitions.reserve.Reservation._build_pre_fork",
            ("part(0, length // size)", "part(0, -(-length // size))"),
            ("if length % size:", "if False:"),
        ),
        layers="reference promise",
    ),
    Mutant(
        "F5-post-copy",
        "a post-fork shares the partly filled last page instead of copying it",
        edit(
            "transitions.fork.apply_post_forks",
            ("full, tail = divmod(source.length, size)", "full, tail = -(-source.length // size), 0"),
        ),
        layers="reference promise",
    ),
    Mutant(
        "F5-owner",
        "a post-fork shares pages without becoming an owner",
        off("transitions.fork.apply_post_forks", "pool.share(shared)"),
        layers="promise",
    ),
    Mutant(
        "F7-zero",
        "a segment of no tokens opens its stream",
        edit(
            "transitions.reserve.Reservation.segment", ("if self.step.commit and segment.span:", "if self.step.commit:")
        ),
        layers="reference oracle",
    ),
    # -- plan ahead
    Mutant(
        "S1-identity",
        "a step that is planned behind a staged one runs on its pages",
        edit(
            "ops.Plan._view",
            (
                "row, start = self.lease.placed(place)",
                "row, start = self.lease.placed(place)\n"
                "        if row is not None and row.stream.rows and row.stream.rows[0] is not row:\n"
                "            row = row.stream.rows[0]\n"
                "            start = row.start",
            ),
        ),
        layers="oracle crash",
    ),
    Mutant(
        "S2-pages",
        "a cancelled step keeps what it had taken",
        off("transitions.leaving.end_without_effect", "give_back(state, row)"),
        layers="promise",
    ),
    Mutant(
        "S2-label",
        "a label is opened when its step is admitted, and stays when that is cancelled",
        edit(
            "transitions.reserve.Reservation.build",
            ("for stream in self.new:", "for stream in self.new:\n            stream.opened = True"),
        ),
        layers="oracle",
    ),
    Mutant(
        "S3-ended",
        "a cancelled lease can be planned",
        edit("transitions.step.plan", ("if not lease.open:", "if False:"), ("state.own(lease)", "pass")),
        layers="reference",
    ),
    Mutant(
        "S3-replaced",
        "a plan that a newer one replaced can be launched",
        edit("transitions.step.launch_enter", ("if lease.plan is not planned:", "if False:")),
        layers="reference",
    ),
    Mutant(
        "S4-slot",
        "only the step staged last can be undone",
        edit(
            "transitions.step._end_all",
            (
                "end_without_effect(state, row)",
                "(end_row if any(s > lease.serial for s in state.leases) else end_without_effect)(state, row)",
            ),
        ),
        layers="promise",
    ),
    Mutant(
        "S5-beneath",
        "a step that is aborted leaves those planned on its result valid",
        off("transitions.step._end_all", "void_above(row)"),
        layers="reference",
    ),
    Mutant(
        "S6-generation",
        "undoing a step takes the generation back to what it was when that was admitted",
        edit(
            "transitions.step._end_all",
            (
                "end_without_effect(state, row)",
                "end_without_effect(state, row)\n        row.stream.generation = row.generation",
            ),
        ),
        layers="promise",
    ),
    # -- publish and retrieve
    Mutant(
        "P1-nothing",
        "an offloaded stream is published as no tokens in no pages",
        edit(
            "transitions.retrieve._record",
            (
                "stream.length, stream.released, state.page_size, pages, not on_device,",
                "stream.length if on_device else 0, stream.released, state.page_size, pages, False,",
            ),
        ),
        layers="reference",
    ),
    Mutant(
        "P2-epoch",
        "a publisher says that what it published holds, whatever became of it",
        edit("transitions.retrieve.epoch_holds", ("stream is not None and stream.epoch == epoch", "True")),
        layers="oracle",
    ),
    Mutant(
        "P2-moved",
        "publish says what was noted, although the pages have left since",
        edit(
            "transitions.retrieve.publish",
            ("stream.epoch == record.epoch and isinstance(stream.residency, OnDevice) and not record.on_host", "True"),
        ),
        layers="reference",
    ),
    Mutant(
        "P2-removed",
        "publish says what was noted of a request that is gone",
        edit("transitions.retrieve.publish", ("if state.requests.get(request.id) is not request:", "if False:")),
        layers="reference",
        seed=6,
    ),
    Mutant(
        "P2-wait",
        "publish does not wait until the host has seen the bytes complete",
        off("manager.KVManager.publish", "self.backend.wait(noted.after)"),
        to_come="virtual device (to come): in memory every op has run when it was submitted",
    ),
    Mutant(
        "P3-remove",
        "remove and reset free the pages that a fetch is writing",
        edit(
            "transitions.leaving.empty",
            (
                "residency.fetch.cancel_requested = True",
                "residency.fetch.cancel_requested = True\n        state.device.drop(residency.fetch.owned, (0, 0, 0))",
            ),
        ),
        layers="promise",
        seed=4,
    ),
    Mutant(
        "P3-cancel",
        "a cancel frees the pages at once, before the transport has confirmed it",
        edit(
            "transitions.retrieve.cancel_retrieve",
            ("fetch.cancel_requested = True", "cancelled(state, fetch)"),
        ),
        layers="reference",
        seed=4,
    ),
    Mutant(
        "P4-length",
        "the length moves when the fetch is claimed",
        edit(
            "transitions.retrieve._fetch",
            (
                "state.claims[fetch.serial] = fetch",
                "state.claims[fetch.serial] = fetch\n    stream.length = record.length",
            ),
        ),
        layers="promise",
    ),
    Mutant(
        "P4-published",
        "a stream that is being fetched is published",
        both(
            edit("transitions.retrieve.snapshot", (" or isinstance(stream.residency, (Fetching, FetchFailed))", "")),
            edit("transitions.retrieve.publish", (" or isinstance(stream.residency, (Fetching, FetchFailed))", "")),
        ),
        layers="reference",
    ),
    Mutant(
        "P4-pending",
        "a stream that is being fetched is said to be off the device, as if a reload would help",
        edit("transitions.claim.off_device", ("if isinstance(residency, Fetching):", "if False:")),
        layers="reference",
    ),
    Mutant(
        "P5-failed",
        "reset leaves the error of a failed fetch",
        edit(
            "transitions.lifecycle.reset",
            (
                "for stream in list(found.streams.values()):",
                "for stream in [s for s in found.streams.values() if s.residency.name != 'FetchFailed']:",
            ),
        ),
        layers="reference oracle",
        seed=4,
    ),
    Mutant(
        "P7-failed",
        "a fetch that failed counts as landed",
        wrap("transitions.retrieve.failed", _landed_anyway),
        layers="promise oracle",
    ),
    Mutant(
        "P8-twice",
        "the first fetch of a request that is cancelled frees the pages of all of them",
        edit(
            "transitions.retrieve.cancelled",
            (
                "state.device.drop(fetch.owned, NOTHING)",
                "for one in [fetch, *(c for c in state.claims.values() if isinstance(c, Fetch))]:\n"
                "        if one.stream.request is stream.request:\n"
                "            state.device.drop(one.owned, NOTHING)",
            ),
        ),
        by_hand=the_first_of_two_fetches_is_cancelled,
    ),
    Mutant(
        "P9-poll",
        "admit does not look whether a fetch has ended",
        edit("manager.KVManager.admit", ("isinstance(admitted, Refusal) and self.poll()", "False")),
        by_hand=a_decode_phase_after_a_fetch,
    ),
    # -- promises of the design that no row covers
    Mutant(
        "promise-double-free",
        "an abandoned reload drops its device pages twice, and the arena does not notice",
        both(
            edit("arena.Pool.drop", ("raise DoubleFree(self.tier.value, page)", "left = 0")),
            edit(
                "transitions.reload.abandon_reload",
                (
                    "state.device.drop(part.device, copy)",
                    "state.device.drop(part.device, copy)\n        state.device.drop(part.device, copy)",
                ),
            ),
        ),
        layers="promise",
    ),
    Mutant(
        "promise-sink",
        "the sink is granted like any page",
        edit(
            "arena.Arena.__init__",
            ("(tier, self.sectors, 0, size),)", "(tier, self.sectors + (tier is Tier.DEVICE), 0, size),)"),
        ),
        layers="reference",
    ),
    Mutant(
        "promise-epoch-offload",
        "an offload does not raise the epoch",
        off("transitions.offload.commit_offload", "stream.epoch += 1"),
        layers="promise",
    ),
    Mutant(
        "promise-epoch-retention",
        "retention does not raise the epoch",
        off("transitions.step._commit_row", "stream.epoch += 1"),
        layers="promise",
    ),
    Mutant(
        "promise-epoch-reset",
        "a reset does not raise the epoch",
        off("transitions.leaving.empty", "stream.epoch += 1"),
        layers="promise",
    ),
    Mutant(
        "promise-generation",
        "a commit does not raise the generation",
        off("transitions.step.commit", "stream.generation += 1"),
        layers="promise",
    ),
    Mutant(
        "promise-sealed-early",
        "pages are sealed up to what was computed, not up to what was accepted",
        edit(
            "transitions.step._commit_row", ("row.start // size, length // size", "row.start // size, row.stop // size")
        ),
        layers="promise",
    ),
    Mutant(
        "promise-sealed-kept",
        "a reset keeps pages sealed",
        off("transitions.leaving.empty", "pool.sealed[page] = 0"),
        layers="promise",
    ),
    Mutant(
        "promise-unsealed",
        "a full page is not sealed",
        both(
            edit("arena.Pool.seal", ("sealed[page] = 1", "pass")),
            off("transitions.step._seal_last", "pool.sealed[table[place]] = 1"),
        ),
        layers="promise",
    ),
    Mutant(
        "promise-later",
        "pages of a claim wait for leases that were admitted after it, too",
        edit(
            "transitions.leaving.leave_claim",
            ("for lease in open_on(stream) if lease < serial", "for lease in open_on(stream)"),
        ),
        layers="reference",
        seed=12,
        programs=100,
    ),
    Mutant(
        "promise-forgotten",
        "a stream that nobody opened stays in its request when its step was cancelled",
        off("transitions.leaving.end_row", "forget(state, stream)"),
        layers="reference",
        seed=2,
    ),
    Mutant(
        "promise-room",
        "a step on a full page is taken to need no further one",
        edit(
            "state.State.room",
            ("-(-length // self.page_size) * self.page_size", "(length // self.page_size + 1) * self.page_size"),
        ),
        layers="reference promise",
    ),
    Mutant(
        "promise-released",
        "retention counts pages, not tokens, as released",
        edit("transitions.retention.retain", ("released += count * state.page_size", "released += count")),
        layers="reference",
        seed=2,
    ),
    Mutant(
        "promise-position",
        "the position of the next token is lost by an offload",
        edit(
            "transitions.offload.commit_offload",
            ("stream.generation += 1", "stream.generation += 1\n            stream.released = 0"),
        ),
        layers="promise",
        seed=3,
    ),
    Mutant(
        "promise-refused",
        "a refused admit keeps the pages that there were",
        edit(
            "transitions.step._short",
            (
                "return PagesExhausted(",
                "state.device.pools[0].grant(len(state.device.pools[0].free))\n    return PagesExhausted(",
            ),
        ),
        layers="refusal reference",
    ),
    Mutant(
        "promise-host-owners",
        "host pages that labels share have one owner",
        off("transitions.offload.claim_offload", "_count_sharing(state, claim)"),
        layers="promise",
    ),
    Mutant(
        "promise-sharing",
        "a reload gives every label pages of its own",
        edit(
            "transitions.reload.claim_reload",
            (
                "back = [own[page] if page in own else fresh[page] for page in host]",
                "back = [own[page] if page in own else fresh[page] for page in host]\n"
                "            again = [place for place, page in enumerate(back) if page in seen[group]]\n"
                "            for place, page in zip(again, pool.grant(min(len(again), len(pool.free)))):\n"
                "                back[place] = page",
            ),
        ),
        layers="reference",
    ),
    Mutant(
        "promise-extra",
        "a reload brings no room for the next step",
        off("transitions.reload.claim_reload", "wants = coming.wants_per_label()"),
        layers="reference",
    ),
    Mutant(
        "promise-extra-counted",
        "a reload is not refused for the pages of its next step",
        edit("transitions.reload.claim_reload", ("sum(own[group] for own in wants.values())", "0")),
        layers="crash reference",
    ),
    Mutant(
        "promise-accepted",
        "every computed token is stored, accepted or not",
        edit("transitions.step._commit_row", (" if stored is None else stored", "")),
        layers="oracle",
    ),
    Mutant(
        "promise-assumed",
        "a step stays valid when fewer tokens were accepted beneath it",
        off("transitions.step._commit_row", "void_above(row)"),
        layers="reference",
    ),
    Mutant(
        "promise-uncommitted",
        "a step that does not commit moves lengths",
        both(
            edit("transitions.reserve.Reservation.segment", ("self.step.commit and segment.span", "segment.span")),
            edit("transitions.step._commit_row", ("commits = row.lease.step.commit", "commits = True")),
        ),
        layers="reference promise",
    ),
    Mutant(
        "promise-launch-order",
        "steps on one stream launch in any order",
        edit("transitions.step.launch_enter", ("and not _launches_next(row)", "and False")),
        layers="reference",
    ),
    Mutant(
        "promise-commit-order",
        "steps on one stream commit in any order",
        edit(
            "transitions.step.commit",
            ("if not row.void and row.stream.rows[0] is not row:", "if False:"),
            ("del stream.rows[0]", "stream.rows.remove(row)"),
        ),
        layers="reference",
    ),
    Mutant(
        "promise-temps",
        "the pages of a step that does not commit are not returned",
        edit("transitions.step._return_temps", ("if any(row.temps):", "if False:")),
        layers="promise",
    ),
    Mutant(
        "promise-lock",
        "the lock of KVManager guards nothing",
        _no_lock,
        to_come="schedules of the real code (to come): the walk has one thread, and threads meet by luck only",
    ),
)

# -- the hunt


@attrs.frozen
class Caught:
    """A mutant and how the walk met it. `programs` includes the one that shows it."""

    mutant: Mutant
    sizes: Sizes
    violation: Violation
    programs: int
    seconds: float


def hunt(mutant: Mutant, programs_max: int | None = None, seed: int | None = None) -> Caught | None:
    """Walk on the mutated core from the mutant's seed on, for at most its number of programs; return what was met."""
    tally = Tally("mutants")
    start = time.monotonic()
    with mutant.patch():
        met = walk(
            mutant.seed if seed is None else seed,
            float("inf"),
            tally,
            programs_max=mutant.programs if programs_max is None else programs_max,
            worlds=ONE_GROUP,
        )
    if met is None:
        return None
    return Caught(mutant, *met, tally.programs, time.monotonic() - start)


# Sources are read while they are what was imported: an editor may be at work.
for _module in core_modules():
    if getattr(_module, "__file__", None):
        linecache.getlines(str(_module.__file__))
