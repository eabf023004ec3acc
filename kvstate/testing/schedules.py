"""Random schedules: an engine around the reference scheduler, in tiny pools, under everything that can happen to it.

A schedule is drawn from (seed, index) alone. Requests are added, cancelled, failed, added again; batches are scheduled,
launched and updated, one by one or one ahead; copies and launches fail. What is generated must be what a model with all
the memory in the world generates (`engine.expected`); no call may raise; nothing may hang; and when nothing is live,
nothing is held.
"""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import attrs

from kvstate.batch import Batch, Blocked, Idle, InFlight, Update
from kvstate.demand import fits, pages_at_most
from kvstate.errors import SubmitError
from kvstate.manager import KVManager
from kvstate.ops import CopyIn, CopyOut, ForkCopy, Op, StepBegin, Tier
from kvstate.reasons import CHOSEN, Reason
from kvstate.refusals import Refusal, TooLarge
from kvstate.requests import Added, Finish, GenerationRequest, Output, Phase, Work
from kvstate.scheduler import Scheduler
from kvstate.state import Lease
from kvstate.testing.engine import VOCABULARY, StampModel, expected, logprob_of
from kvstate.testing.judge import EdgeJudge
from kvstate.testing.memory import POISON, MemoryBackend
from kvstate.testing.walk import Tally
from kvstate.testing.world import Violation
from kvstate.types import Geometry, Group, Step

ADMITS_MAX = 5_000
"""Steps asked for in one call of `schedule`: more are a loop."""

BARREN_MAX = 400
"""Turns in a row that bring no request further than it ever was: more are a hang."""

REQUIRED: tuple[str, ...] = (
    *(f"added {name}" for name in ("a request", "an id again", "during another life of its id")),
    *(f"refused {name}" for name in ("EmptyPrompt", "NothingToGenerate", "TooLarge", "DuplicateRequest")),
    *(f"decided {reason.name}" for reason in Reason if reason not in (Reason.EXPELLED, Reason.NOT_READY, Reason.RESET_REFUSED, Reason.BEHIND, Reason.FORKS_LATER)),
    *(f"{verb} while {phase.name}" for verb in ("cancelled", "failed") for phase in (Phase.WAITING, Phase.FORKING, Phase.ACTIVE, Phase.OFFLOADED)),
    *(f"{verb} in flight" for verb in ("cancelled", "failed")),
    "cancelled what is not live",
    *(f"ended by {finish.name}" for finish in (Finish.LENGTH, Finish.STOP)),
    *(f"bar lifted by {how}" for how in ("finish", "cancel", "fail", "the last active one")),
    "late token ignored",
    "token in flight taken back",
    "scheduled one ahead",
    "launched one ahead",
    "fed a token in flight",
    "nothing before the batch in flight",
    "plan promoted anew",
    "batch that no longer counts",
    "batch aborted",
    "launch failed",
    "idle",
    "forked into new requests",
    "fork dropped with its source",
    "forked after a soft reset",
    "started on cached pages",
    "started on cached pages after a soft reset",
    "several restored at once",
    "several evicted at once",
    "offloaded and reset in one relief",
    "prefill victim restored",
    "decode victim restored",
    "weights changed",
    "several groups",
    "window",
)  # fmt: skip
"""What must be reached before these schedules may be said to hold."""


class Hang(Exception):
    """A call of the scheduler does not end."""


class CountingManager(KVManager):
    """A manager that notices when its scheduler asks for steps without end."""

    asked = 0

    def admit(self, step_: Step) -> Lease | Refusal:
        """Admit, and count."""
        self.asked += 1
        if self.asked > ADMITS_MAX:
            raise Hang(f"{self.asked} steps were asked for in one call")
        return super().admit(step_)


@attrs.frozen
class Setup:
    """The world of one schedule."""

    seed: int
    index: int
    geometry: Geometry
    budget: int
    batch: int
    policy: str
    prefix_cache: bool
    asynchronous: bool
    logprobs: bool
    requests: int
    trouble: float
    debug: bool


GROUPS = (
    (Group("full", 128),),
    (Group("full", 256), Group("window", 128, window=3)),
    (Group("full", 128), Group("window", 128, window=5)),
    (Group("window", 128, window=4),),
)


def setup(seed: int, index: int) -> Setup:
    """Draw the world of a schedule."""
    draw = random.Random(f"setup/{seed}/{index}")
    groups = GROUPS[0] if draw.random() < 0.7 else draw.choice(GROUPS[1:])
    pages = draw.randint(3, 12) + 2 * (len(groups) - 1)
    return Setup(
        seed,
        index,
        Geometry(
            pages=pages, page_size=draw.randint(1, 4), host_pages=draw.choice((0, 2, 3, 5, pages, 3 * pages)),
            groups=groups,
        ),
        budget=draw.choice((1, 2, 3, 5, 8, 64)),
        batch=draw.choice((1, 2, 3, 4, 16)),
        policy=draw.choice(("decode-first", "decode-first", "prefill-first")),
        prefix_cache=draw.random() < 0.5,
        asynchronous=draw.random() < 0.6,
        logprobs=draw.random() < 0.3,
        requests=draw.randint(1, 12),
        trouble=draw.choice((0.0, 0.0, 0.1, 0.3)),
        debug=draw.random() < 0.3,
    )  # fmt: skip


class Life:
    """One life of a request: what was asked for, and what came of it."""

    def __init__(self, request: GenerationRequest, geometry: Geometry) -> None:
        self.request = request
        self.expected = expected(request, geometry)
        self.outputs: dict[int, Output] = {}


class Play:
    """One schedule while it runs."""

    def __init__(self, world: Setup) -> None:
        self.world = world
        self.draw = random.Random(f"play/{world.seed}/{world.index}")
        geometry = world.geometry
        self.judge = EdgeJudge(geometry.page_size, sinks_of(geometry)) if len(geometry.groups) == 1 else None
        self.backend = backend_of(geometry, self.judge)
        self.manager = CountingManager(geometry, self.backend, debug=world.debug, clock=lambda: 0.0)
        self.now_s = 0.0
        self.scheduler = Scheduler(
            self.manager,
            budget=world.budget,
            batch=world.batch,
            policy=world.policy,  # type: ignore[arg-type]
            prefix_cache=world.prefix_cache,
            asynchronous=world.asynchronous,
            clock=self.clock,
        )
        self.model = StampModel(self.backend, geometry, logprobs=world.logprobs)
        self.seen: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.script: list[str] = []
        self.lives: dict[str, Life] = {}
        self.names: list[str] = []
        self.planned: deque[Batch] = deque()
        self.launched: deque[Batch] = deque()
        self.left = world.requests
        self.barren = 0
        self.furthest: dict[int, int] = {}
        self.idle = False

    def clock(self) -> float:
        """Return a time that nobody may decide by: it jumps."""
        self.now_s += self.draw.random()
        return self.now_s

    # -- the run

    def run(self) -> None:
        """Play to the end.

        Raises
        ------
        Violation
            When something is not as it must be.
        """
        try:
            while not (self.idle and not self.left):
                self.turn()
            self.check_empty()
        except Violation:
            raise
        except Exception as error:
            raise self.violation("crash", f"{type(error).__name__}: {error}") from error

    def turn(self) -> None:
        """Do one thing, then look."""
        draw = self.draw
        for call, weight in (
            (self.add, 0.25 if self.left else 0.0),
            (self.add_what_is_refused, 0.04),
            (self.cancel, 0.05 if self.left else 0.02),
            (self.fail, 0.03),
            (self.break_something, 0.3 * self.world.trouble),
            (self.abort, 0.05 * self.world.trouble),
            (self.change_weights, 0.02 if self.world.prefix_cache else 0.0),
        ):
            if draw.random() < weight:
                call()
        self.engine()
        self.spoil()
        self.progress()
        if self.judge is not None and self.judge.conflicts:
            raise self.violation("judge", str(self.judge.conflicts[0]))

    def engine(self) -> None:
        """Schedule, launch or update: whatever can be done, in any order that an engine may choose."""
        choices: list[Callable[[], None]] = []
        if self.planned:
            choices.append(self.launch)
        elif len(self.scheduler.in_flight) <= self.world.asynchronous:
            choices.append(self.schedule)
        if self.launched:
            choices.append(self.update)
        if choices:
            self.draw.choice(choices)()

    # -- requests

    def request(self, id: str, prompt: int, tokens: int) -> GenerationRequest:
        """Draw a request; prompts begin alike, so that prefixes are found."""
        draw = self.draw
        head = [draw.randrange(2)] * prompt if draw.random() < 0.6 else []
        rest = [draw.randrange(VOCABULARY) for _ in range(prompt)]
        stop = range(draw.randrange(97), VOCABULARY, 97) if draw.random() < 0.3 else ()
        return GenerationRequest(
            id, (head + rest)[draw.randrange(prompt) : ][:prompt] if head else rest, tokens,
            samples=draw.choice((1, 1, 1, 2, 3)), stop=tuple(stop),
        )  # fmt: skip

    def add(self) -> None:
        """Add a request that may or may not fit; now and then under an id that was used before."""
        self.left -= 1
        draw = self.draw
        gone = [name for name in self.names if not self.scheduler.outputs(name)]
        id = draw.choice(gone) if gone and draw.random() < 0.3 else f"r{len(self.names)}"
        room = self.world.geometry.pages * self.world.geometry.page_size
        request = self.request(id, draw.randint(1, max(1, room * 2 // 3)), draw.randint(1, max(2, room // 2)))
        again = id in self.names
        in_flight = any(work.request.id == id for batch in self.scheduler.in_flight for work in batch.works)
        added = self.call("add", request)
        if isinstance(added, Added):
            self.seen["added an id again" if again else "added a request"] += 1
            if again and in_flight:
                self.seen["added during another life of its id"] += 1
            self.idle = False
            if not again:
                self.names.append(id)
            if not self.fits(request):
                raise self.violation("refusal", f"{request} was added and can never fit")
            self.lives[id] = Life(request, self.world.geometry)
        elif isinstance(added, TooLarge):
            self.seen["refused TooLarge"] += 1
            if self.fits(request):
                raise self.violation("refusal", f"{request} was refused and fits alone: {added}")
        else:
            raise self.violation("refusal", f"{request}: {added}")

    def fits(self, request: GenerationRequest) -> bool:
        """Tell whether a request fits alone, in steps of one token."""
        return fits(self.world.geometry, pages_at_most(self.world.geometry, len(request.prompt), request.tokens_max, 1))

    def add_what_is_refused(self) -> None:
        """Add what no scheduler may take: it is refused, and nothing else notices."""
        draw = self.draw
        live = [work.request.id for work in self.scheduler.live]
        bad = [GenerationRequest("x", (), 3), GenerationRequest("x", (1,), 0), GenerationRequest("x", (1,), 1, 0)]
        bad += [GenerationRequest("x", (1,) * 1000, 1), GenerationRequest("x", (1,), 1000)]
        bad += [GenerationRequest(id, (1,), 1) for id in live[:1]]
        bad += [GenerationRequest(work.key, (1,), 1) for work in self.scheduler.live if work.sample][:1]
        request = draw.choice(bad)
        if (
            request.id == "x"
            and self.world.geometry.groups[0].window is not None
            and len(request.prompt) + request.tokens_max > 9
        ):
            return
        refusal = self.call("add", request)
        if not isinstance(refusal, Refusal):
            raise self.violation("refusal", f"{request} was added")
        self.seen[f"refused {type(refusal).__name__}"] += 1

    def cancel(self) -> None:
        """Cancel somebody, who may not be live."""
        self.end("cancelled", lambda id: self.call("cancel", id))

    def fail(self) -> None:
        """Fail somebody."""
        self.end("failed", lambda id: self.call("fail", id, "asked for"))

    def end(self, how: str, verb: Callable[[str], tuple[Output, ...]]) -> None:
        """End a request in whatever it is doing, and take what it has generated."""
        if not self.names:
            return
        id = self.draw.choice(self.names)
        works = [work for work in self.scheduler.live if work.request.id == id]
        phases = [work.phase for work in works]
        in_flight = any(work in batch.works for work in works for batch in self.scheduler.in_flight)
        barred, active = self.scheduler.roster.waiting.barred, len(self.scheduler.roster.active)
        outputs = verb(id)
        if not works:
            self.seen["cancelled what is not live"] += 1
        for phase in phases:
            self.seen[f"{how} while {phase.name}"] += 1
        if in_flight:
            self.seen[f"{how} in flight"] += 1
        self.bar(barred, "cancel" if how == "cancelled" else "fail", active)
        self.take(outputs)

    def bar(self, barred: bool, how: str, active: int) -> None:
        """Note what let those who wait in again."""
        if barred and not self.scheduler.roster.waiting.barred:
            self.seen[f"bar lifted by {how}"] += 1
            if active and not self.scheduler.roster.active:
                self.seen["bar lifted by the last active one"] += 1

    # -- the engine

    def schedule(self) -> None:
        """Schedule."""
        self.manager.asked = 0
        before = {work.key: (work.phase, work.stored, len(work.tokens)) for work in self.scheduler.live}
        flying = [work for batch in self.scheduler.in_flight for work in batch.works]
        outcome = self.call("schedule")
        self.look_at(outcome, before, flying)
        self.take(outcome.ended)
        if isinstance(outcome, Batch):
            self.planned.append(outcome)
        elif isinstance(outcome, Blocked):
            raise self.violation("progress", f"{outcome}; nobody else holds anything")
        elif isinstance(outcome, Idle):
            self.idle = not self.scheduler.in_flight
            self.seen["idle"] += 1
            if self.idle:
                self.check_empty()

    def look_at(self, outcome: Any, before: dict[str, Any], flying: list[Work]) -> None:
        """Note what a pass decided."""
        decided = Counter(decision.reason for decision in outcome.decisions)
        for reason in decided:
            self.seen[f"decided {reason.name}"] += 1
        resets = [
            r
            for r in decided
            if r.name.startswith("RESET_") and r not in (Reason.RESET_RELOAD_FAILED, Reason.RESET_FORK_FAILED)
        ]
        self.seen["several restored at once"] += decided[Reason.RESTORED] > 1
        self.seen["several evicted at once"] += decided[Reason.OFFLOADED] + sum(decided[r] for r in resets) > 1
        self.seen["offloaded and reset in one relief"] += bool(decided[Reason.OFFLOADED] and resets)
        works = {(work.request.id, work.sample): work for work in self.scheduler.live}
        for decision in outcome.decisions:
            work = works.get((decision.request, decision.sample))
            if work is None or decision.reason not in (Reason.OFFLOADED, Reason.RESTORED, *resets):
                continue
            if decision.reason is Reason.RESTORED:
                left = len(work.tokens) - work.stored
                self.seen["decode victim restored" if left == 1 and work.generated else "prefill victim restored"] += 1
            elif work in flying:
                self.seen["token in flight taken back"] += 1
        if not isinstance(outcome, Batch):
            self.seen["nothing before the batch in flight"] += not isinstance(outcome, Idle)
            return
        if len(self.scheduler.in_flight) > 1:
            self.seen["scheduled one ahead"] += 1
        for place, work in enumerate(outcome.works):
            if outcome.found(place):
                self.seen["started on cached pages" + " after a soft reset" * bool(work.soft_resets)] += 1
            if outcome.forks(place) and work.soft_resets:
                self.seen["forked after a soft reset"] += 1

    def launch(self) -> None:
        """Launch the batch that was planned."""
        batch = self.planned.popleft()
        before = batch.plan
        plan = self.scheduler.promote(batch)
        if plan is None:
            self.seen["batch that no longer counts"] += 1
            self.script.append(f"{batch!r} no longer counts")
            return
        self.seen["plan promoted anew"] += plan is not before
        self.seen["launched one ahead"] += bool(self.launched)
        self.seen["fed a token in flight"] += any(entry.feeds is not None for entry in batch.entries)
        self.script.append(f"launch {batch!r}")
        try:
            with self.manager.launch(plan):
                self.model.launch(batch, plan)
        except SubmitError:
            self.seen["launch failed"] += 1
            self.script.append("it failed")
            self.scheduler.abort(batch)
        else:
            self.launched.append(batch)

    def update(self) -> None:
        """Give back what the oldest batch has sampled."""
        batch = self.launched.popleft()
        sampled = self.model.result(batch)
        barred, active = self.scheduler.roster.waiting.barred, len(self.scheduler.roster.active)
        forks = [place for place in range(len(batch)) if batch.forks(place)]
        done: Update = self.call("update", batch, sampled.tokens, sampled.logprobs)
        self.seen["late token ignored"] += bool(done.late)
        if forks:
            alive = {work.key for work in done.advanced}
            forked = [p for p in forks if any(c.key in alive for c in batch.children(p))]
            self.seen["forked into new requests"] += bool(forked)
            self.seen["fork dropped with its source"] += len(forked) < len(forks)
        if done.ended:
            self.bar(barred, "finish", active)
        for work in done.advanced:
            self.check_so_far(work.output())
        self.take(done.ended)

    def abort(self) -> None:
        """Give up the newest batch that was not launched, or the newest that was."""
        batches = self.planned or self.launched
        if batches:
            batch = batches.pop()
            self.call("abort", batch)
            self.seen["batch aborted"] += 1

    def break_something(self) -> None:
        """Make the next op of some kind fail at submit."""
        kind: type[Op] = self.draw.choice((CopyOut, CopyOut, CopyIn, CopyIn, CopyIn, ForkCopy, StepBegin))
        self.backend.fail_next(kind)
        self.script.append(f"the next {kind.__name__} fails")

    def change_weights(self) -> None:
        """Empty the prefix cache. (The weights stay, so that what is expected stays.)"""
        self.call_manager("reset_prefix_cache")
        self.seen["weights changed"] += 1

    def spoil(self) -> None:
        """Spoil every page that is free."""
        now = self.manager.view()
        for tier, pools in ((Tier.DEVICE, now.device), (Tier.HOST, now.host)):
            for group, pool in enumerate(pools):
                self.backend.poison(tier, group, pool.free)

    # -- checks

    def call(self, verb: str, *args: Any) -> Any:
        """Call the scheduler and write it down."""
        result = getattr(self.scheduler, verb)(*args)
        self.calls[verb] += 1
        self.script.append(f"{verb}({', '.join(map(_short, args))}) -> {_short(result)}")
        return result

    def call_manager(self, verb: str) -> None:
        """Call the manager and write it down."""
        getattr(self.manager, verb)()
        self.script.append(f"manager.{verb}()")

    def take(self, outputs: tuple[Output, ...]) -> None:
        """Check outputs that are final, and note them."""
        for output in outputs:
            life = self.lives.get(output.request)
            if life is None or output.sample in life.outputs:
                raise self.violation("output", f"{output} is nobody's, or the second one")
            life.outputs[output.sample] = output
            tokens, finish = life.expected[output.sample]
            self.check_so_far(output)
            if output.finish in (Finish.LENGTH, Finish.STOP):
                self.seen[f"ended by {output.finish.name}"] += 1
                if (output.tokens, output.finish) != (tokens, finish):
                    raise self.violation("output", f"{output} should be {tokens}, {finish}")
            elif output.finish is Finish.FAILED and output.error != "asked for":
                raise self.violation("output", f"{output.request} failed by itself: {output.error}")

    def check_so_far(self, output: Output) -> None:
        """Check that what was generated so far is the beginning of what must be."""
        tokens, _ = self.lives[output.request].expected[output.sample]
        if output.tokens != tokens[: len(output.tokens)]:
            raise self.violation("output", f"{output.request}[{output.sample}] has {output.tokens}, not {tokens}")
        if self.world.logprobs and output.logprobs != (tuple(map(logprob_of, output.tokens)) or None):
            raise self.violation("output", f"{output} has other log-probabilities")

    def progress(self) -> None:
        """Count how long nobody got further than ever before."""
        now = {work.rank: work.generated + max(work.stored, work.stored_most) for work in self.scheduler.live}
        further = any(value > self.furthest.get(rank, 0) for rank, value in now.items())
        ended = len(self.furthest.keys() - now.keys()) > 0
        self.furthest = {rank: max(value, self.furthest.get(rank, 0)) for rank, value in now.items()}
        self.barren = 0 if further or ended or self.idle or not now else self.barren + 1
        if self.barren > BARREN_MAX:
            raise self.violation("progress", f"nobody got further in {self.barren} turns: {self.scheduler.live}")

    def check_empty(self) -> None:
        """Check that every request was answered, and that nothing is held."""
        for life in self.lives.values():
            if len(life.outputs) != life.request.samples:
                raise self.violation("output", f"{life.request.id} ended with {sorted(life.outputs)} only")
        now = self.manager.view()
        if now.requests or now.leases or now.claims:
            raise self.violation("empty", f"idle, and there are {now.requests}, {now.leases}, {now.claims}")
        owned = [page for pools in (now.device, now.host) for pool in pools for page in pool.owners if page]
        if owned:
            raise self.violation("empty", f"idle, and {len(owned)} pages are owned")

    def violation(self, witness: str, detail: str) -> Violation:
        """Return what a person needs to see what happened."""
        lines = "\n".join(self.script[-60:])
        return Violation(witness, f"{detail}\n{self.world}\n{lines}", ())


def _short(value: Any) -> str:
    if isinstance(value, GenerationRequest):
        return f"{value.id}: {len(value.prompt)}+{value.tokens_max}×{value.samples}"
    if isinstance(value, Batch):
        parts = [f"{w.key}@{value.start(p)}+{value.span(p)}" for p, w in enumerate(value.works)]
        others = [f"{d.request}[{d.sample}] {d.reason.name}" for d in value.decisions if d.reason not in CHOSEN]
        return f"batch {value.serial} {', '.join(parts)}" + f" ({', '.join(others)})" * bool(others)
    if isinstance(value, Update):
        return f"{[work.key for work in value.advanced]}, ended {[o.request for o in value.ended]}, late {value.late}"
    if isinstance(value, (Idle, InFlight, Blocked)):
        why = [f"{d.request}[{d.sample}] {d.reason.name}" for d in value.decisions]
        return f"{type(value).__name__} {', '.join(why)}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_short, value))})"
    if isinstance(value, Output):
        return f"{value.request}[{value.sample}] {value.finish} after {len(value.tokens)}"
    return str(value)


def sinks_of(geometry: Geometry) -> dict[tuple[Tier, int], int]:
    """Return the sink page per (tier, group)."""
    device = {(Tier.DEVICE, group): pages for group, pages in enumerate(geometry.group_pages)}
    return device | {(Tier.HOST, group): pages for group, pages in enumerate(geometry.host_group_pages)}


def backend_of(geometry: Geometry, judge: EdgeJudge | None) -> MemoryBackend:
    """Return a backend in memory."""
    backend = MemoryBackend(geometry, judge=judge)
    size = geometry.page_size
    backend.device = [[POISON] * ((pages + 1) * size) for pages in geometry.group_pages]
    backend.host = [[POISON] * ((pages + 1) * size) for pages in geometry.host_group_pages]
    return backend


def play(seed: int, index: int) -> Play:
    """Play one schedule and return it.

    Raises
    ------
    Violation
        When something is not as it must be.
    """
    run = Play(setup(seed, index))
    run.run()
    return run


def schedules(
    seed: int,
    seconds: float,
    tally: Tally,
    progress: Callable[[Tally], None] = lambda tally: None,
    schedules_max: int | None = None,
) -> tuple[Setup, Violation] | None:
    """Play schedules until `seconds` are over or `schedules_max` were played; return the first violation."""
    start = time.monotonic()
    index = 0
    while (schedules_max is None or index < schedules_max) and time.monotonic() - start < seconds:
        world = setup(seed, index)
        run = Play(world)
        try:
            run.run()
        except Violation as violation:
            return world, violation
        finally:
            tally.programs += 1
            tally.accepted.update(run.calls)
            tally.refused.update({name: n for name, n in run.seen.items() if name.startswith("refused")})
            tally.seen.update(+run.seen)
            tally.seconds = time.monotonic() - start
        index += 1
        progress(tally)
    return None


def missing(reached: Counter[str]) -> tuple[str, ...]:
    """Return what is required and was not reached."""
    return tuple(name for name in REQUIRED if not reached[name])
