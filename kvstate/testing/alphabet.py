"""The alphabet: every verb with what it needs and how its arguments are drawn.

One alphabet serves hypothesis and the random walk, and every subject. No letter is shaped to a known bug: arguments are
drawn from what exists and, now and then, from what does not.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import attrs

from kvstate.prefix import Key
from kvstate.state import Fetch, Lease, Status
from kvstate.testing import prompts
from kvstate.testing.world import SALTS, Node
from kvstate.types import (
    LabelFork,
    Publication,
    RequestConfig,
    RetentionPolicy,
    Segment,
    Step,
    StreamFork,
    StreamId,
)
from kvstate.view import StreamView

T = TypeVar("T")

REQUESTS = ("r", "s", "t")
LABELS = ("main", "cfg", "beam")


class Chooser(Protocol):
    """Where choices come from: hypothesis, or a seeded generator."""

    def below(self, count: int) -> int:
        """Return a number of ``0 … count``, the border left out; smaller is simpler."""


@attrs.frozen
class RandomChooser:
    """Choices of a seeded generator."""

    random: random.Random

    def below(self, count: int) -> int:
        return int(self.random.random() * count)


def pick(choose: Chooser, values: Sequence[T]) -> T:
    """Return one of `values`; earlier is simpler."""
    return values[choose.below(len(values))]


def chance(choose: Chooser, percent: int) -> bool:
    """Return True in `percent` of 100 cases; False is simpler."""
    return choose.below(100) >= 100 - percent


@attrs.frozen
class Letter:
    """A verb: how often the walk takes it, when it can be called, and how it is drawn and called."""

    verb: str
    weight: int
    ready: Callable[[Node], bool]
    call: Callable[[Node, Chooser], Any]


def _request(node: Node, choose: Chooser) -> str:
    """Return a live request, now and then any."""
    live = [request for request, _ in node.now.requests]
    return pick(choose, live) if live and not chance(choose, 4) else pick(choose, REQUESTS)


def _stream(node: Node, choose: Chooser) -> StreamId:
    request = _request(node, choose)
    known = [s.label for s in node.now.streams if s.request == request and s.opened]
    label = pick(choose, known) if known and chance(choose, 70) else pick(choose, LABELS)
    return StreamId(request, label)


def _policy(node: Node, choose: Chooser) -> RetentionPolicy:
    size = node.subject.capacities.page_size
    return RetentionPolicy(1 + choose.below(3 * size), choose.below(size + 2) if chance(choose, 40) else 0)


def _config(node: Node, choose: Chooser) -> RequestConfig | None:
    if not chance(choose, 25):
        return None
    retention = {pick(choose, LABELS): _policy(node, choose)} if chance(choose, 60) else {}
    salt = pick(choose, SALTS) if chance(choose, 40) else ""
    return RequestConfig(labels=LABELS[: 1 + choose.below(2)], retention=retention, cache_salt=salt)


def _prompt(choose: Chooser) -> int:
    """Return a prompt that others have too, or none."""
    return pick(choose, prompts.PROMPTS) if chance(choose, 60) else 0


def _prefix(node: Node, stream: StreamId, choose: Chooser) -> tuple[Key, ...]:
    """Return what a lookup found for a stream, now and then something else."""
    size = node.subject.capacities.page_size
    held = node.reference.requests.get(stream.request)
    salt = held.config.cache_salt if held is not None else ""
    prompt = node.prompts.get(stream.request, 0)
    found = prompts.keys(prompt if prompt and not chance(choose, 10) else 1, prompts.PAGES, size, salt)
    others = [s.image.keys for s in node.reference.streams() if s.image.keys]
    if others and chance(choose, 15):
        found = tuple(pick(choose, others))
    matched = node.subject.match(found)
    if chance(choose, 10):
        return found[: 1 + choose.below(len(found))]
    return found[: matched if not chance(choose, 20) else choose.below(matched + 1)]


def _segments(node: Node, choose: Chooser) -> list[Segment]:
    size = node.subject.capacities.page_size
    segments = []
    for _ in range(1 + (choose.below(3) if chance(choose, 50) else 0)):
        if chance(choose, 6):
            segments.append(Segment.padding(1 + choose.below(2)))
            continue
        stream = _stream(node, choose)
        span = 1 + choose.below(2 * size) if not chance(choose, 6) else 0
        if chance(choose, 1):
            span = 1 + max(node.geometry.group_pages) * size
        segments.append(Segment(stream.request, stream.label, span))
    return segments


def _on_prefixes(node: Node, segments: list[Segment], choose: Chooser) -> list[Segment]:
    """Let streams that store nothing start on what a lookup finds; now and then others try to."""
    stored = {(s.request, s.label) for s in node.now.streams if s.length or s.rows}
    started: list[Segment] = []
    seen: set[tuple[str | None, str]] = set()
    for segment in segments:
        name = (segment.request, segment.label)
        if segment.request is not None and segment.span and name not in seen:
            if chance(choose, 4 if name in stored else 60):
                prefix = _prefix(node, StreamId(segment.request, segment.label), choose)
                segment = attrs.evolve(segment, prefix=prefix)
        seen.add(name)
        started.append(segment)
    return started


def _forks(node: Node, choose: Chooser, percent: int) -> list[LabelFork | StreamFork]:
    """Return up to three forks, of labels or of streams; they may chain."""
    forks: list[LabelFork | StreamFork] = []
    taken: set[StreamId | str] = set()
    streams = chance(choose, 60)
    while len(forks) < 3 and chance(choose, percent if not forks else 50):
        if streams:
            source, target = _stream(node, choose), _stream(node, choose)
            if source != target and target not in taken:
                taken.add(target)
                forks.append(StreamFork(source, target))
        else:
            one, two = pick(choose, LABELS), pick(choose, LABELS)
            if one != two and two not in taken:
                taken.add(two)
                forks.append(LabelFork(one, two))
    return forks


def _step(node: Node, choose: Chooser) -> Step:
    segments = _segments(node, choose)
    retention = {pick(choose, LABELS): _policy(node, choose)} if chance(choose, 5) else {}
    commit = not chance(choose, 8)
    return Step(
        _on_prefixes(node, segments, choose) if commit else segments,
        pre_forks=_forks(node, choose, 18),
        post_forks=_forks(node, choose, 18),
        commit=commit,
        retention=retention,
    )


def _keyable(node: Node) -> list[StreamView]:
    """Return the streams that have whole pages to key."""
    size = node.subject.capacities.page_size
    return [
        s
        for s in node.now.streams
        if s.residency == "OnDevice" and s.length - s.keyed * size >= size and not (s.stale or s.released)
        if node.honest(s.request, s.label)
    ]


def _key(node: Node, choose: Chooser) -> Any:
    """Key what a stream stores, mostly all of it; mostly of one that has whole pages without keys."""
    size = node.subject.capacities.page_size
    open_ = _keyable(node)
    if open_ and not chance(choose, 10):
        found = pick(choose, open_)
        stream = StreamId(found.request, found.label)
    else:
        stream = _stream(node, choose)
    if not node.honest(stream.request, stream.label):
        return None
    return node.key(stream.request, stream.label, choose.below(4 * size) if chance(choose, 20) else None)


def _accepted(lease: Lease, choose: Chooser) -> tuple[int, ...] | None:
    """Return None, or counts of which each stream gets a prefix of its tokens."""
    if not chance(choose, 30):
        return None
    counts: list[int] = []
    closed: set[tuple[str | None, str]] = set()
    for segment in lease.step.segments:
        key = (segment.request, segment.label)
        count = 0 if key in closed else choose.below(segment.span + 1)
        if count < segment.span and segment.request is not None:
            closed.add(key)
        counts.append(count)
    return tuple(counts)


def _leases(node: Node, *statuses: Status) -> list[Lease]:
    return [lease for lease in node.leases if lease.status in statuses]


def _some_lease(node: Node, choose: Chooser, *statuses: Status) -> Lease:
    """Return a lease in one of `statuses`, now and then any lease there ever was."""
    fitting = _leases(node, *statuses)
    if fitting and not chance(choose, 4):
        return pick(choose, fitting)
    return pick(choose, node.every_lease[-6:])


def _enter(node: Node, choose: Chooser) -> Any:
    plan = node.plan_of(_some_lease(node, choose, Status.PLANNED))
    if chance(choose, 4):
        plan = pick(choose, node.every_plan[-6:])
    return node.launch_enter(plan, fail=any(any(fork.copies) for fork in plan.lease.forks) and chance(choose, 50))


def _commit(node: Node, choose: Chooser) -> Any:
    lease = _some_lease(node, choose, Status.LAUNCHED)
    return node.commit(lease, _accepted(lease, choose), fail=bool(lease.forks) and chance(choose, 50))


def _publications(node: Node) -> list[Any]:
    return [publication for other in node.world.nodes.values() for publication in other.publications]


def _snapshot(node: Node, choose: Chooser) -> Any:
    """Note a request that stores something, now and then any."""
    full = list(dict.fromkeys(s.request for s in node.now.streams if s.length))
    return node.snapshot(pick(choose, full) if not chance(choose, 10) else pick(choose, REQUESTS))


def _publish(node: Node, choose: Chooser) -> Any:
    return node.publish(pick(choose, node.snapshots) if not chance(choose, 4) else pick(choose, node.every_snapshot))


def _foreign(publication: Publication, choose: Chooser) -> Publication:
    """Return what a worker of another world, or with other pages, would publish."""
    if chance(choose, 50):
        return attrs.evolve(publication, world_size=2)
    ranks = {
        rank: {label: attrs.evolve(record, page_size=record.page_size + 1) for label, record in labels.items()}
        for rank, labels in publication.ranks.items()
    }
    return attrs.evolve(publication, ranks=ranks)


def _retrieve(node: Node, choose: Chooser) -> Any:
    others = [p for other in node.world.nodes.values() if other is not node for p in other.publications]
    publications = others if others and not chance(choose, 10) else _publications(node)
    publication = pick(choose, publications[-4:][::-1])
    labels = LABELS[: 1 + choose.below(2)]
    if chance(choose, 8):
        publication = _foreign(publication, choose)
    return node.claim_retrieve(_request(node, choose), publication, labels)


def _cancelled(node: Node) -> list[Any]:
    return list(node.subject.transport.cancels)


def _live(node: Node) -> bool:
    return bool(node.now.requests)


def _busy(node: Node) -> bool:
    """Tell whether there is something to lose."""
    return any(s.length or s.rows or s.residency != "OnDevice" for s in node.now.streams)


def _found(node: Node) -> bool:
    """Tell whether much can be found by keys."""
    return sum(len(pool.keys) for pool in node.now.device) > 2


def _has(*statuses: Status) -> Callable[[Node], bool]:
    return lambda node: bool(_leases(node, *statuses))


def _some_claim(node: Node, choose: Chooser) -> Any:
    return pick(choose, node.claims) if not chance(choose, 4) else pick(choose, node.every_claim[-6:])


def _to_run(node: Node) -> list[Lease]:
    return [lease for lease in _leases(node, Status.ENTERED) if lease.serial not in node.written]


def _to_copy(node: Node) -> list[Any]:
    return [fetch for fetch in node.fetches if fetch.serial not in node.copied]


_A, _P, _E, _L = Status.ADMITTED, Status.PLANNED, Status.ENTERED, Status.LAUNCHED

ALPHABET: tuple[Letter, ...] = (
    Letter(
        "ingest", 12, lambda n: len(n.now.requests) < len(REQUESTS),
        lambda n, c: n.ingest(pick(c, REQUESTS), _config(n, c), _prompt(c)),
    ),
    Letter("admit", 26, _live, lambda n, c: n.admit(_step(n, c))),
    Letter("plan", 20, _has(_A), lambda n, c: n.plan(_some_lease(n, c, _A, _A, _P))),
    Letter(
        "launch_enter", 20, _has(_P),
        _enter,
    ),
    Letter("run", 4, lambda n: bool(_to_run(n)), lambda n, c: n.run(pick(c, _to_run(n)))),
    Letter("launch_exit", 20, _has(_E), lambda n, c: n.launch_exit(pick(c, _leases(n, _E)))),
    Letter("commit", 24, _has(_L), _commit),
    Letter("abort", 4, lambda n: bool(n.leases), lambda n, c: n.abort(_some_lease(n, c, _A, _P, _E, _L))),
    Letter(
        "claim_offload", 9, _live, lambda n, c: n.claim_offload(_request(n, c), chance(c, 35), fail=chance(c, 8)),
    ),
    Letter(
        "claim_reload", 18, lambda n: any(s.residency == "OnHost" for s in n.now.streams) or len(n.now.streams) > 3,
        lambda n, c: n.claim_reload(_request(n, c), _step(n, c) if chance(c, 40) else None, fail=chance(c, 8)),
    ),
    Letter("commit_claim", 18, lambda n: bool(n.claims), lambda n, c: n.commit_claim(_some_claim(n, c))),
    Letter("abandon", 5, lambda n: bool(n.claims), lambda n, c: n.abandon(_some_claim(n, c))),
    Letter("snapshot", 7, lambda n: any(s.length for s in n.now.streams), _snapshot),
    Letter("publish", 12, lambda n: bool(n.snapshots), _publish),
    Letter("claim_retrieve", 14, lambda n: _live(n) and bool(_publications(n)), _retrieve),
    Letter("copy", 3, lambda n: bool(_to_copy(n)), lambda n, c: n.copy(pick(c, _to_copy(n)))),
    Letter("land", 9, lambda n: bool(n.fetches), lambda n, c: n.land(pick(c, n.fetches))),
    Letter("fail_fetch", 3, lambda n: bool(n.fetches), lambda n, c: n.fail_fetch(pick(c, n.fetches))),
    Letter("cancel_retrieve", 20, lambda n: bool(n.fetches), lambda n, c: n.cancel_retrieve(_request(n, c))),
    Letter("confirm_cancel", 16, lambda n: bool(_cancelled(n)), lambda n, c: n.confirm_cancel(pick(c, _cancelled(n)))),
    Letter("key", 10, lambda n: any(s.length for s in n.now.streams), _key),
    Letter("reset_prefix_cache", 1, _found, lambda n, c: n.reset_prefix_cache()),
    Letter("reset", 4, _busy, lambda n, c: n.reset(_request(n, c), free=not chance(c, 50))),
    Letter("remove", 4, _busy, lambda n, c: n.remove(_request(n, c))),
)  # fmt: skip


def advance(node: Node, choose: Chooser) -> Any:
    """Take the next lock-sized call of one open lease, claim or fetch: what a program mostly does."""
    work = [*node.leases, *node.claims, *node.fetches]
    item = pick(choose, work)
    if isinstance(item, Lease):
        fail = chance(choose, 15)
        if item.status is Status.ADMITTED or item.void > (item.plan.void if item.plan is not None else 0):
            if item.status in (Status.ADMITTED, Status.PLANNED):
                return node.plan(item)
        if item.status is Status.PLANNED:
            return node.launch_enter(node.plan_of(item), fail=fail and any(any(fork.copies) for fork in item.forks))
        if item.status is Status.ENTERED:
            return node.launch_exit(item)
        committed = node.commit(item, _accepted(item, choose), fail=fail and bool(item.forks))
        # As a server does that has a prefix cache: what a step filled is keyed at once.
        return _key(node, choose) if _keyable(node) and chance(choose, 50) else committed
    if isinstance(item, Fetch):
        return node.land(item)
    return node.commit_claim(item) if item.failure is None else node.abandon(item)


ADVANCE = Letter("advance", 60, lambda n: bool(n.leases or n.claims or n.fetches), advance)

LETTERS = {letter.verb: letter for letter in ALPHABET}
