"""The world of a checked program: nodes that run every verb on a subject and on the reference, and compare.

A node calls the subject, then the reference, and then looks: does the answer agree, did a refusal change nothing, do
all promises hold, does every stream hold what was committed, do the edges cover every conflict. A program is the list
of calls; it can be written by hand, drawn by hypothesis, walked at random, shrunk, saved and replayed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from inspect import signature
from typing import Any

import attrs

from kvstate import invariants
from kvstate.backend import Cancelled, Failed, Landed
from kvstate.errors import PromiseBroken
from kvstate.ops import CopyIn, CopyOut, ForkCopy, Plan
from kvstate.refusals import Refusal
from kvstate.state import Fetch, Lease, OffloadClaim, ReloadClaim, Stream
from kvstate.testing import prompts, sometimes
from kvstate.testing.memory import given_back
from kvstate.testing.subject import SUBJECTS, Contents, Subject
from kvstate.testing.transport import Network
from kvstate.transitions.prefix import Keyed
from kvstate.transitions.reload import Reloaded
from kvstate.transitions.retrieve import Retrieval, Snapshot
from kvstate.types import MAIN, Geometry, Group, Publication, RequestConfig, Segment, Step, StreamId
from kvstate.view import StateView
from kvstate_spec.reference import Reference, agrees
from kvstate_spec.refinement import abstract_view, difference


class Violation(Exception):
    """A program showed something that must not be.

    Attributes
    ----------
    witness
        Who saw it: reference, refusal, promise, oracle, judge, or crash.
    detail
        What it saw.
    program
        The calls that lead there.
    """

    def __init__(self, witness: str, detail: str, program: Sequence[Call]) -> None:
        super().__init__(f"{witness}: {detail}")
        self.witness = witness
        self.detail = detail
        self.program = tuple(program)


@attrs.frozen
class Handle:
    """Stands for what an earlier call returned, by name."""

    name: str


@attrs.frozen
class Call:
    """One call of a program: on which node, the verb, its arguments, and the name that its result gets."""

    node: str
    verb: str
    args: tuple[Any, ...]
    gives: str


def _groups(values: Iterable[Any]) -> tuple[Group, ...]:
    return tuple(value if isinstance(value, Group) else Group(**value) for value in values)


@attrs.frozen
class Sizes:
    """Sizes of a world; both nodes have them. `groups` are Groups, or what ``attrs.asdict`` made of them."""

    pages: int = 6
    host_pages: int = 4
    page_size: int = 2
    subject: str = "manager"
    device: str = "memory"
    groups: tuple[Group, ...] = attrs.field(default=(Group(),), converter=_groups)


def _verb(call: Call, actual: Any) -> str:
    """Return the name under which the promises know what a call did."""
    if isinstance(actual, (Landed, Failed, Cancelled)):
        return type(actual).__name__.lower()
    if call.verb == "commit_claim":
        return "commit_reload" if isinstance(actual, Reloaded) else "commit_offload"
    if call.verb == "abandon":
        return "abandon_offload"
    return call.verb


def _key(stream: Stream) -> tuple[str, str]:
    return stream.request.id, stream.label


SALTS = ("", "tenant")
"""The cache salts that requests of a program have."""


@cache
def _defaults(verb: str) -> dict[int, Any]:
    """Return the default of each argument of a verb that has one, by its place from 1."""
    parameters = list(signature(getattr(Node, verb)).parameters.values())[1:]
    return {place: p.default for place, p in enumerate(parameters, start=1) if p.default is not p.empty}


class World:
    """Two nodes, "a" and "b", that can retrieve from each other, and the program they have run."""

    def __init__(self, sizes: Sizes | None = None, **changes: Any) -> None:
        self.sizes = attrs.evolve(sizes if sizes is not None else Sizes(), **changes)
        self.network = Network()
        self.program: list[Call] = []
        self.handles: dict[str, Any] = {}
        self.names: dict[int, str] = {}
        self.seen: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        # What the labels of a publication stored when it was made.
        self.published: dict[int, dict[str, tuple[Any, ...]]] = {}
        # False while a call makes further calls that are part of what it means.
        self.recording = True
        self.stamps = prompts.Stamps()
        self._count = 0
        self.nodes = {address: Node(self, address) for address in ("a", "b")}
        self.a = self.nodes["a"]
        self.b = self.nodes["b"]

    def record(self, node: str, verb: str, args: tuple[Any, ...]) -> Call:
        """Note a call; handles are written by name."""
        if not self.recording:
            return Call(node, verb, args, "")
        self._count += 1
        call = Call(
            node, verb, tuple(self._by_name(arg) for arg in args), f"{verb.rsplit('_', maxsplit=1)[-1]}{self._count}"
        )
        self.program.append(call)
        return call

    def _by_name(self, value: Any) -> Any:
        name = self.names.get(id(value))
        return value if name is None else Handle(name)

    def name(self, value: Any, name: str) -> None:
        """Let `value` be known as `name` in the program."""
        self.handles[name] = value
        self.names[id(value)] = name

    def play(self, call: Call) -> bool:
        """Run a recorded call; False when a handle it needs was never made, or the call no longer makes sense."""
        args = []
        for arg in call.args:
            if isinstance(arg, Handle):
                if arg.name not in self.handles:
                    return False
                arg = self.handles[arg.name]
            args.append(arg)
        node = self.nodes[call.node]
        if not node.sensible(call.verb, args):
            return False
        number = "".join(c for c in call.gives if c.isdigit())
        self._count = int(number) - 1
        getattr(node, call.verb)(*args)
        return True

    def finish(self) -> None:
        """End everything that is open, on both nodes, and see that idle means empty."""
        for node in self.nodes.values():
            node.finish()


class Node:
    """One subject beside its reference. Every method is a lock-sized verb that checks everything after it ran."""

    def __init__(self, world: World, address: str) -> None:
        sizes = world.sizes
        geometry = Geometry(sizes.pages, sizes.page_size, sizes.host_pages, sizes.groups, name=address)
        self.geometry = geometry
        self.world = world
        self.address = address
        self.subject: Subject = SUBJECTS[sizes.subject](geometry, world.network, address, sizes.device)
        self.reference = Reference(geometry, address=address)
        # What is open, and everything there ever was: ended handles are used too.
        self.leases: list[Lease] = []
        self.every_lease: list[Lease] = []
        self.every_plan: list[Plan] = []
        self.every_claim: list[OffloadClaim | ReloadClaim] = []
        self.claims: list[OffloadClaim | ReloadClaim] = []
        self.fetches: list[Fetch] = []
        self.publications: list[Publication] = []
        self.snapshots: list[Snapshot] = []
        self.every_snapshot: list[Snapshot] = []
        self._noted: dict[int, dict[str, tuple[Any, ...]]] = {}
        self.plans: dict[int, Plan] = {}
        self.written: dict[int, list[list[int]]] = {}
        self.after: dict[tuple[int, str, str], list[Any] | None] = {}
        self.copied: set[int] = set()
        self.now = self.subject.snapshot()
        self._plans = 0
        self._plan_numbers: dict[int, int] = {}
        self._fetched: dict[int, list[Any]] = {}
        # The prompt that a live request follows, and how often the weights have changed.
        self.prompts: dict[str, int] = {}
        self.weights = 0

    # -- verbs

    def _same(self, verb: str, *args: Any) -> Any:
        """Make a call that the reference takes as it is."""
        call = self._call(verb, *args)
        actual = self._apply(call, verb, *args)
        return self._judge(call, actual, getattr(self.reference, verb)(*args))

    def ingest(self, request: str, config: RequestConfig | None = None, prompt: int = 0) -> Any:
        """Ingest a request; its streams begin with the tokens of `prompt`, if it is new."""
        call = self._call("ingest", request, config, prompt)
        if request not in self.reference.requests:
            self.prompts[request] = prompt
        actual = self._apply(call, "ingest", request, config)
        return self._judge(call, actual, self.reference.ingest(request, config))

    def admit(self, step: Step) -> Any:
        """Admit a step, after asking what would become of it."""
        call = self._call("admit", step)
        self._probe(step)
        actual = self._apply(call, "admit", step)
        handle = actual.serial if isinstance(actual, Lease) else -1
        expected = self.reference.admit(step, handle=handle)
        if isinstance(actual, Lease):
            self.leases.append(actual)
            self.every_lease.append(actual)
            self.world.name(actual, call.gives)
        return self._judge(call, actual, expected)

    def plan(self, lease: Lease) -> Any:
        """Plan a lease."""
        call = self._call("plan", lease)
        self._plans += 1
        actual = self._apply(call, "plan", lease)
        expected = self.reference.plan(lease.serial, handle=self._plans)
        if isinstance(actual, Plan):
            self.plans[lease.serial] = actual
            self.every_plan.append(actual)
            self.world.name(actual, call.gives)
            self._plan_numbers[id(actual)] = self._plans
        return self._judge(call, actual, expected)

    def launch_enter(self, plan: Plan, fail: bool = False) -> Any:
        """Enter a launch; `fail`: the copies of its pre-forks fail at submit, which aborts it as `launch` does."""
        call = self._call("launch_enter", plan, fail)
        lease = plan.lease
        if fail:
            self.subject.fail_next(ForkCopy)
        actual = self._apply(call, "launch_enter", plan)
        self.subject.fail_none()
        expected = self.reference.launch_enter(lease.serial, plan=self._plan_numbers[id(plan)])
        result = self._judge(call, actual, expected)
        if not isinstance(actual, Refusal) and lease.failure is not None:
            self.world.seen["fork copy failed"] += 1
            self.world.recording = False
            self.abort(lease)
            self.launch_exit(lease)
            self.world.recording = True
        return result

    def run(self, lease: Lease) -> None:
        """Let the model of an entered launch run: it reads every view and writes its tokens."""
        call = self._call("run", lease)
        plan = self.plans[lease.serial]
        tokens, expected = self._model(lease)
        self.written[lease.serial] = tokens
        try:
            seen = self.subject.compute(plan, tokens)
        except Exception as error:
            self._violated("crash", f"the model of {call.gives} raised {type(error).__name__}: {error}")
        for place, (want, contents) in enumerate(zip(expected, seen, strict=True)):
            if want is not None:
                skipped = plan.in_step_order[place].skipped
                detail = self._differs(want, contents, skipped)
                if detail is not None:
                    self._violated("oracle", f"segment {place} of {call.gives} read {detail}")
        self._look(call, None)

    def launch_exit(self, lease: Lease) -> Any:
        """Leave a launch; the model runs first if it has not."""
        if lease.serial not in self.written and lease.failure is None:
            self.run(lease)
        call = self._call("launch_exit", lease)
        actual = self._apply(call, "launch_exit", lease)
        self.reference.launch_exit(lease.serial)
        if not lease.open:
            self.leases.remove(lease)
        return self._judge(call, actual, None)

    def commit(self, lease: Lease, accepted: Sequence[int] | None = None, fail: bool = False) -> Any:
        """Commit a lease; `fail`: the copies of its post-forks fail at submit."""
        call = self._call("commit", lease, accepted, fail)
        if fail:
            self.subject.fail_next(ForkCopy)
        actual = self._apply(call, "commit", lease, accepted)
        failed = self.subject.fail_none()
        expected = self.reference.commit(lease.serial, self.written.get(lease.serial, []), accepted)
        if not isinstance(actual, Refusal):
            self.leases.remove(lease)
            if not isinstance(expected, Refusal) and tuple(actual.dropped) != tuple(expected):
                self._violated("reference", f"dropped {actual.dropped}, expected {expected}")
            if fail and failed:
                self.world.seen["post-fork copy failed"] += 1
                self.reference.fork_failed()
        return self._judge(call, actual, expected)

    def abort(self, lease: Lease) -> Any:
        """Abort a lease."""
        call = self._call("abort", lease)
        actual = self._apply(call, "abort", lease)
        if not lease.open and lease in self.leases:
            self.leases.remove(lease)
        return self._judge(call, actual, self.reference.abort(lease.serial))

    def claim_offload(self, request: str, discard_in_flight: bool = False, fail: bool = False) -> Any:
        """Claim a request for offload; `fail`: its copy fails at submit."""
        call = self._call("claim_offload", request, discard_in_flight, fail)
        if fail:
            self.subject.fail_next(CopyOut)
        actual = self._apply(call, "claim_offload", request, discard_in_flight)
        handle = actual.serial if isinstance(actual, OffloadClaim) else -1
        expected = self.reference.claim_offload(request, discard_in_flight, handle=handle)
        return self._claimed(call, actual, expected)

    def claim_reload(self, request: str, extra: Step | None = None, fail: bool = False) -> Any:
        """Claim a request for reload; `fail`: its copy fails at submit."""
        call = self._call("claim_reload", request, extra, fail)
        if fail:
            self.subject.fail_next(CopyIn)
        actual = self._apply(call, "claim_reload", request, extra)
        handle = actual.serial if isinstance(actual, ReloadClaim) else -1
        expected = self.reference.claim_reload(request, extra, handle=handle)
        return self._claimed(call, actual, expected)

    def _claimed(self, call: Call, actual: Any, expected: Any) -> Any:
        self.subject.fail_none()
        if isinstance(actual, (OffloadClaim, ReloadClaim)):
            self.claims.append(actual)
            self.every_claim.append(actual)
            self.world.name(actual, call.gives)
            if actual.failure is not None:
                self.world.seen[f"{actual.verb} copy failed"] += 1
                self.reference.op_failed(actual.serial, actual.failure)
        return self._judge(call, actual, expected)

    def commit_claim(self, claim: OffloadClaim | ReloadClaim) -> Any:
        """Commit an offload or reload."""
        return self._end("commit_claim", f"commit_{claim.verb}", claim)

    def abandon(self, claim: OffloadClaim | ReloadClaim) -> Any:
        """Abandon an offload or reload."""
        return self._end("abandon", f"abandon_{claim.verb}", claim)

    def _end(self, said: str, verb: str, claim: OffloadClaim | ReloadClaim) -> Any:
        """Call `verb`, which may end the claim; a program says `said`."""
        call = self._call(said, claim)
        actual = self._apply(call, verb, claim)
        expected = getattr(self.reference, verb)(claim.serial)
        if not claim.open and claim in self.claims:
            self.claims.remove(claim)
        return self._judge(call, actual, expected)

    def snapshot(self, request: str) -> Any:
        """Note what a request could publish; `publish` says it."""
        call = self._call("snapshot", request)
        noted = self._apply(call, "snapshot", request)
        expected = self.reference.publishable(request)
        if (noted is None) != (expected is None):
            self._violated("reference", f"noted {noted}, expected {expected}")
        if noted is not None and expected is not None:
            said = {label: (r.length, r.released, r.on_host) for label, (_, r) in noted.records.items()}
            if said != expected:
                self._violated("reference", f"noted {said}, expected {expected}")
            self.snapshots.append(noted)
            self.every_snapshot.append(noted)
            self.world.name(noted, call.gives)
            contents = self.reference.contents()
            self._noted[noted.serial] = {label: contents[request, label] for label in said}
        self._look(call, noted)
        return noted

    def publish(self, noted: Snapshot) -> Publication | None:
        """Publish what was noted, of what still holds."""
        call = self._call("publish", noted)
        published: Publication | None = self._apply(call, "publish", noted)
        if noted in self.snapshots:
            self.snapshots.remove(noted)
        if published is not None:
            now = self.reference.publishable(published.request) or {}
            contents, then = self.reference.contents(), self._noted[noted.serial]
            unknown = sorted(set(published.ranks[0]) - (set(now) & set(then)))
            if unknown:
                self._violated("reference", f"published {unknown} of {published.request!r}, which has {sorted(now)}")
            tokens: dict[str, tuple[Any, ...]] = {}
            for label, record in published.ranks[0].items():
                tokens[label] = contents[published.request, label]
                if record.on_host:
                    holds = now.get(label) == (record.length, record.released, True)
                else:
                    tokens[label] = then[label]
                    holds = record.length == len(then[label]) and not now[label][2]
                    holds = holds and contents[published.request, label][: record.length] == then[label]
                if not holds:
                    self._violated("reference", f"published {record} of {label!r}, which stores {now.get(label)}")
            self.publications.append(published)
            self.world.name(published, call.gives)
            self.world.published[id(published)] = tokens
        self._look(call, published)
        return published

    def claim_retrieve(self, request: str, publication: Publication, labels: Sequence[str]) -> Any:
        """Start fetching what a publication has beyond the request's own tokens."""
        call = self._call("claim_retrieve", request, publication, tuple(labels))
        actual = self._apply(call, "claim_retrieve", request, publication, tuple(labels))
        handles: dict[str, int] = {}
        if isinstance(actual, Retrieval):
            for fetch in actual.fetches:
                handles[fetch.stream.label] = fetch.serial
                self.fetches.append(fetch)
                tokens = self.world.published[id(publication)][fetch.stream.label]
                self._fetched[fetch.serial] = list(tokens[fetch.start : fetch.stop])
                self.world.name(fetch, f"{call.gives}_{fetch.stream.label}")
        expected = self.reference.claim_retrieve(request, publication, labels, handles=handles)
        if not isinstance(expected, Refusal) and tuple(handles) != expected:
            self._violated("reference", f"fetches {tuple(handles)}, expected {expected}")
        return self._judge(call, actual, expected)

    def copy(self, fetch: Fetch) -> None:
        """Let the transport copy the bytes of a fetch; they count when it lands."""
        call = self._call("copy", fetch)
        self.subject.transport.copy(fetch)
        self.copied.add(fetch.serial)
        self._look(call, None)

    def land(self, fetch: Fetch) -> Any:
        """Let a fetch end: it lands when its publisher still holds the epoch, else it fails."""
        if fetch.serial not in self.copied:
            self.copy(fetch)
        call = self._call("land", fetch)
        self.subject.transport.finish(fetch)
        return self._fetch_ended(call, fetch)

    def fail_fetch(self, fetch: Fetch) -> Any:
        """Let a fetch fail, with garbage in its pages."""
        call = self._call("fail_fetch", fetch)
        self.subject.transport.fail(fetch, "made to fail")
        return self._fetch_ended(call, fetch)

    def confirm_cancel(self, fetch: Fetch) -> Any:
        """Let the transport confirm a cancel that was asked for."""
        call = self._call("confirm_cancel", fetch)
        self.subject.transport.confirm_cancel(fetch)
        return self._fetch_ended(call, fetch)

    def _fetch_ended(self, call: Call, fetch: Fetch) -> Any:
        self.fetches.remove(fetch)
        ended = self._apply(call, "poll")
        [(found, outcome)] = ended
        assert found is fetch
        expected: Any
        if isinstance(outcome, Landed):
            expected = self.reference.landed(fetch.serial, self._fetched[fetch.serial])
        elif isinstance(outcome, Failed):
            expected = self.reference.failed(fetch.serial, outcome.error)
        else:
            expected = self.reference.cancelled(fetch.serial)
        self.world.seen[f"fetch {type(outcome).__name__.lower()}"] += 1
        return self._judge(call, outcome, expected)

    def cancel_retrieve(self, request: str) -> Any:
        """Ask for the cancel of a request's fetches."""
        return self._same("cancel_retrieve", request)

    def key(self, request: str, label: str = MAIN, count: int | None = None) -> Any:
        """Key `count` of the tokens that are stored behind the keyed ones (None: all), or more than there are."""
        call = self._call("key", request, label, count)
        tokens = self._unkeyed(request, label)
        if count is not None:
            more = range(prompts.FRESH, prompts.FRESH + max(0, count - len(tokens)))
            tokens = [*tokens[:count], *more]
        actual = self._apply(call, "key", request, tuple(tokens), label)
        expected = self.reference.key(request, tokens, label)
        if isinstance(actual, Keyed) and (actual.pages, actual.taken) != expected:
            self._violated("reference", f"keyed {actual}, expected (pages, taken) {expected}")
        return self._judge(call, actual, expected)

    def _unkeyed(self, request: str, label: str) -> list[int]:
        stamps: Any = self.reference.contents().get((request, label), ())
        held = self.reference.requests.get(request)
        stream = held.streams.get(label) if held is not None else None
        keyed = len(stream.image.keys) * self.geometry.page_size if stream is not None else 0
        return [self.world.stamps.token(stamp) for stamp in stamps[keyed:]]

    def reset_prefix_cache(self) -> Any:
        """Change the weights."""
        call = self._call("reset_prefix_cache")
        actual = self._apply(call, "reset_prefix_cache")
        self.weights += 1
        expected = self.reference.reset_prefix_cache()
        if not isinstance(actual, Refusal) and actual != expected:
            self._violated("reference", f"{actual} pages were found by keys, expected {expected}")
        return self._judge(call, actual, expected)

    def reset(self, request: str, free: bool = True) -> Any:
        """Reset a request."""
        return self._same("reset", request, free)

    def remove(self, request: str) -> Any:
        """Remove a request."""
        return self._same("remove", request)

    def plan_of(self, lease: Lease) -> Plan:
        """Return the newest plan of a lease, or the newest there is."""
        return self.plans.get(lease.serial, self.every_plan[-1])

    # -- ending

    def finish(self) -> None:
        """End leases, claims, fetches and requests; then everything must be empty."""
        for lease in list(self.leases):
            if lease.status.value == "launching":
                self.launch_exit(lease)
            if lease.open:
                self.abort(lease)
        for claim in list(self.claims):
            self.abandon(claim)
        for fetch in list(self.fetches):
            self.fail_fetch(fetch)
        for request, _ in self.now.requests:
            self.remove(request)

    def sensible(self, verb: str, args: Sequence[Any]) -> bool:
        """Tell whether a recorded call can be made now: what the kit itself, not the subject, must refuse."""
        if verb == "run":
            return args[0].status.value == "launching" and args[0].serial not in self.written
        if verb == "launch_exit":
            return bool(args[0].status.value == "launching")
        if verb in ("copy", "land", "fail_fetch"):
            return args[0] in self.fetches and (verb != "copy" or args[0].serial not in self.copied)
        if verb == "confirm_cancel":
            return args[0] in self.subject.transport.cancels
        return verb != "key" or self.honest(*args[:2])

    def honest(self, request: str, label: str = MAIN) -> bool:
        """Tell whether a stream holds nothing of other weights that a fetch brought: such content has no key here."""
        held = self.reference.requests.get(request)
        stream = held.streams.get(label) if held is not None else None
        stamps: Any = stream.image.tokens if stream is not None and not stream.image.stale else ()
        return all(self.world.stamps.weights(stamp) == self.weights for stamp in stamps)

    # -- looking

    def _call(self, verb: str, *args: Any) -> Call:
        defaults = _defaults(verb)
        while args and len(args) in defaults and defaults[len(args)] is args[-1]:
            args = args[:-1]
        return self.world.record(self.address, verb, args)

    def _apply(self, call: Call, verb: str, *args: Any) -> Any:
        self.reference.look(self.now)
        try:
            return self.subject.apply(verb, *args)
        except PromiseBroken as broken:
            self._violated("promise", str(broken))
        except Exception as error:
            self._violated("crash", f"{verb} raised {type(error).__name__}: {error}")

    def _violated(self, witness: str, detail: str) -> None:
        raise Violation(witness, f"after call {len(self.world.program)}, {detail}", self.world.program)

    def _judge(self, call: Call, actual: Any, expected: Any) -> Any:
        detail = agrees(expected, actual)
        if detail is not None:
            self._violated("reference", f"{call.verb}: {detail}")
        self._look(call, actual)
        return actual

    def _look(self, call: Call, actual: Any) -> None:
        """Check everything there is to check after a call."""
        before, now = self.now, self.subject.snapshot()
        self.now = now
        verb = _verb(call, actual)
        if isinstance(actual, Refusal):
            self.world.refused[type(actual).__name__] += 1
            if now != before:
                self._violated("refusal", f"{call.verb} was refused ({actual}) and the view changed")
        else:
            self.world.accepted[call.verb] += 1
            try:
                invariants.check(now, before, verb)
            except PromiseBroken as broken:
                self._violated("promise", str(broken))
            self._poison(before, now)
            self._contents(now)
            wrong = self.reference.settle(now)
            if wrong is not None:
                self._violated("reference", f"{call.verb}: {wrong}")
            detail = difference(abstract_view(now), self.reference.abstract())
            if detail is not None:
                self._violated("reference", f"{call.verb}: {detail}")
            self._questions(now)
        conflicts = self.subject.conflicts()
        if conflicts:
            self._violated("judge", str(conflicts[0]))
        self.world.seen.update(sometimes.seen(call.verb, actual, before, now))

    def _poison(self, before: StateView, now: StateView) -> None:
        for tier, group, freed in given_back(before, now):
            self.subject.poison(tier, group, freed)

    def _contents(self, now: StateView) -> None:
        committed = self.reference.contents()
        for stream in now.streams:
            if stream.opened:
                want = committed.get((stream.request, stream.label))
                contents = self.subject.content(now, stream)
                detail = f"{contents}" if want is None else self._differs(want, contents, stream.skipped)
                if detail is not None:
                    self._violated("oracle", f"{stream.request}/{stream.label} holds {detail}")

    def _differs(self, want: Sequence[Any], contents: Contents, skipped: Sequence[int]) -> str | None:
        """Say what a group holds instead of the tokens of `want` that its window has not left."""
        for group, (got, skip) in enumerate(zip(contents, skipped, strict=True)):
            committed = list(want[skip * self.world.sizes.page_size :])
            if got != committed:
                return f"{got} in group {group}, committed was {committed}"
        return None

    def _model(self, lease: Lease) -> tuple[list[list[int]], list[list[Any] | None]]:
        """Return what each segment writes, and what it must find in front of it.

        None where nobody knows: padding, void rows, rows above one whose retention nobody has simulated.
        """
        step = lease.step
        committed = self.reference.contents()
        void = set(lease.void_places())
        hits = self.reference.leases[lease.serial].hits
        history: dict[tuple[str, str], list[Any] | None] = {}

        def base(key: tuple[str, str]) -> list[Any] | None:
            if key not in history:
                below = [
                    (row.lease.serial, *key)
                    for other in self.leases
                    for row in other.rows
                    if other.serial < lease.serial and not row.void and _key(row.stream) == key
                ]
                history[key] = self.after.get(max(below)) if below else list(committed.get(key, ()))
            return history[key]

        retained = bool(step.retention) or any(
            self.subject_config(segment).retention for segment in step.segments if segment.request is not None
        )
        for fork in lease.forks:
            if fork.pre:
                content = base(_key(fork.source.stream))
                history[_key(fork.target.stream)] = None if content is None else list(content)
        forked = dict(history)
        contexts: list[list[Any] | None] = []
        tokens: list[list[int]] = []
        for place, segment in enumerate(step.segments):
            if segment.request is None:
                contexts.append(None)
                tokens.append(self._write(None, [], segment.span))
                continue
            key = (segment.request, segment.label)
            content = base(key)
            if segment.prefix and content is not None:
                content = [*content, *hits[StreamId(*key)].tokens]
            contexts.append(None if place in void else content)
            tokens.append(self._write(None if place in void else segment.request, content, segment.span))
            history[key] = None if content is None else content + tokens[place]
        if not step.commit:
            history = dict(forked)
        for row in lease.rows:
            content = base(_key(row.stream))
            self.after[lease.serial, *_key(row.stream)] = None if retained else content
        return tokens, contexts

    def _write(self, request: str | None, content: list[Any] | None, span: int) -> list[int]:
        """Return what the model writes behind `content`: the request's prompt as far as it goes, then what is new."""
        prompt = self.prompts.get(request, 0) if request is not None and content is not None else 0
        stamps = list(content or ())
        for _ in range(span):
            token = prompts.token(prompt, len(stamps), self.geometry.page_size)
            stamps.append(self.world.stamps.write(self.weights, stamps[-1] if stamps else None, token))
        return stamps[len(stamps) - span :]

    def _probe(self, step: Step) -> None:
        """Ask what an admission would answer, now and once what is leaving has left."""
        self.reference.look(self.now)
        for leaving in (False, True):
            detail = agrees(self.reference.probe(step, leaving), self.subject.probe(step, leaving))
            if detail is not None:
                self._violated("reference", f"probe(leaving={leaving}): {detail}")

    def _questions(self, now: StateView) -> None:
        """Ask what can be asked without a call, and compare."""
        reference = self.reference
        reference.look(now)
        asked: list[tuple[str, Any, Any]] = []
        for request, _ in now.requests:
            for name in ("reclaimable", "gain"):
                actual, expected = getattr(self.subject, name)(request), getattr(reference, name)(request)
                asked.append((f"{name}({request!r})", actual, expected))
        asked.append(("pages_available()", self.subject.pages_available(), reference.pages_available()))
        if reference.findable or any(pool.keys for pool in now.device):
            for salt in SALTS:
                for prompt in prompts.PROMPTS:
                    keys = prompts.keys(prompt, prompts.PAGES, now.page_size, salt)
                    asked.append((f"match of prompt {prompt}", self.subject.match(keys), reference.match(keys)))
        found = {(g, bytes.fromhex(key)) for g, pool in enumerate(now.device) for _, key in pool.keys}
        parents = {(g, key): reference.parents[key] if reference.findable[g, key].depth else None for g, key in found}
        asked.append(("what the events say is findable", self.subject.findable(), parents))
        for what, actual, expected in asked:
            if actual != expected:
                self._violated("reference", f"{what} is {actual}, expected {expected}")

    def subject_config(self, segment: Segment) -> RequestConfig:
        """Return the config of a segment's request; an empty one once it is gone."""
        request = self.reference.requests.get(segment.request or "")
        return request.config if request is not None else RequestConfig()
