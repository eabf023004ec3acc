"""One random schedule while it runs."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from kvstate.errors import SubmitError
from kvstate.manager import KVManager
from kvstate.ops import CopyIn, CopyOut, ForkCopy, Op, Plan, StepBegin
from kvstate.refusals import Refusal, TooLarge
from kvstate.scheduler import Scheduler
from kvstate.scheduler.batch import Batch, Blocked, Idle, InFlight, Update
from kvstate.scheduler.demand import fits, pages_at_most
from kvstate.scheduler.requests import Added, Finish, GenerationRequest, Output
from kvstate.state import Lease
from kvstate.testing import backends
from kvstate.testing.engine import StampModel, logprob_of
from kvstate.testing.judge import EdgeJudge
from kvstate.testing.memory import nobodys
from kvstate.testing.schedules import flags
from kvstate.testing.schedules.setup import Life, Setup, request, what_is_refused
from kvstate.testing.world import Violation
from kvstate.types import Step

ADMITS_MAX = 5_000
"""Steps asked for in one call of `schedule`: more are a loop."""

BARREN_MAX = 400
"""Turns in a row that bring no request further than it ever was: more are a hang."""

LINES = 60
"""Of what was called, so many lines are shown with a violation."""


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


class Play:
    """An engine, its users and its troubles, all drawn from one seed; `script` says what was called."""

    def __init__(self, world: Setup) -> None:
        self.world = world
        self.draw = random.Random(f"play/{world.seed}/{world.index}")
        geometry = world.geometry
        self.judge = EdgeJudge.of(geometry)
        self.backend = backends.make(world.device, geometry, self.judge)
        self.manager = CountingManager(geometry, self.backend, debug=world.debug, clock=lambda: 0.0)
        self.now_s = 0.0
        self.scheduler = Scheduler(
            self.manager,
            budget=world.budget,
            batch=world.batch,
            policy=world.policy,
            prefix_cache=world.prefix_cache,
            asynchronous=world.asynchronous,
            clock=self.clock,
        )
        self.model = StampModel(self.backend, geometry, logprobs=world.logprobs)
        self.seen: Counter[str] = Counter(flags.of_world(geometry))
        self.calls: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.script: list[str] = []
        self.lives: dict[str, Life] = {}
        self.names: list[str] = []
        self.planned: deque[Batch] = deque()
        self.launched: deque[Batch] = deque()
        self.left = world.requests
        self.idle = False
        # Turns since somebody got further, and how far each live sample ever was.
        self.barren = 0
        self.furthest: dict[int, int] = {}

    def clock(self) -> float:
        """Return a time that nobody may decide by: it jumps."""
        self.now_s += self.draw.random()
        return self.now_s

    def run(self) -> None:
        """Play to the end.

        Raises
        ------
        Violation
            When something is not as it must be.
        """
        try:
            while not self.idle or self.left:
                self.turn()
            self.check_empty()
        except Violation:
            raise
        except Exception as error:
            raise self.violation("crash", f"{type(error).__name__}: {error}") from error

    def turn(self) -> None:
        """Let users and troubles do something, perhaps; then the engine one thing; then look."""
        trouble = self.world.trouble
        for call, chance in (
            (self.add, 0.25 if self.left else 0.0),
            (self.add_what_is_refused, 0.04),
            (self.cancel, 0.05 if self.left else 0.02),
            (self.fail, 0.03),
            (self.break_something, 0.3 * trouble),
            (self.abort, 0.05 * trouble),
            (self.change_weights, 0.02 if self.world.prefix_cache else 0.0),
        ):
            if self.draw.random() < chance:
                call()
        self.engine()
        for tier, group, pages in nobodys(self.manager.view()):
            self.backend.poison(tier, group, pages)
        self.check_progress()
        if self.judge.violations:
            raise self.violation("judge", str(self.judge.violations[0]))

    # -- users

    def add(self) -> None:
        """Add a request that may or may not fit; now and then under an id that was used before."""
        self.left -= 1
        draw = self.draw
        gone = [name for name in self.names if not self.scheduler.outputs(name)]
        id = draw.choice(gone) if gone and draw.random() < 0.3 else f"r{len(self.names)}"
        room = self.world.geometry.pages * self.world.geometry.page_size
        wanted = request(draw, id, draw.randint(1, max(1, room * 2 // 3)), draw.randint(1, max(2, room // 2)))
        flying = any(work.request.id == id for batch in self.scheduler.in_flight for work in batch.works)
        added = self.call("add", wanted)
        geometry = self.world.geometry
        if isinstance(added, Refusal):
            self.seen[f"refused {type(added).__name__}"] += 1
            self.refused["add"] += 1
            if not isinstance(added, TooLarge) or self.fits(wanted):
                raise self.violation("refusal", f"{wanted} was refused and fits alone: {added}")
            return
        self.seen["added an id again" if id in self.names else "added a request"] += 1
        if id not in self.names:
            self.names.append(id)
        elif flying:
            self.seen["added during another life of its id"] += 1
        self.idle = False
        self.lives[id] = Life(wanted, geometry)
        if not self.fits(wanted):
            raise self.violation("refusal", f"{wanted} was added and can never fit")

    def fits(self, wanted: GenerationRequest) -> bool:
        """Tell whether a request fits alone, in steps of one token."""
        geometry = self.world.geometry
        return fits(geometry, pages_at_most(geometry, len(wanted.prompt), wanted.tokens_max, 1))

    def add_what_is_refused(self) -> None:
        """Add what no scheduler may take: nothing else may notice."""
        wanted = what_is_refused(self.draw, tuple(work.key for work in self.scheduler.live))
        refusal = self.call("add", wanted)
        if isinstance(refusal, Added):
            raise self.violation("refusal", f"{wanted} was added")
        self.seen[f"refused {type(refusal).__name__}"] += 1
        self.refused["add"] += 1

    def cancel(self) -> None:
        """Cancel somebody, who may not be live."""
        self.end("cancelled", "cancel")

    def fail(self) -> None:
        """Fail somebody, who may not be live."""
        self.end("failed", "fail", "asked for")

    def end(self, how: str, verb: str, *why: str) -> None:
        """End a request in whatever it is doing, and take what it has generated."""
        if not self.names:
            return
        id = self.draw.choice(self.names)
        works = [work for work in self.scheduler.live if work.request.id == id]
        phases = [work.phase for work in works]
        lifted = self.lifts()
        self.take(self.call(verb, id, *why))
        lifted(verb)
        if not works:
            self.seen["cancelled what is not live"] += 1
        for phase in phases:
            self.seen[f"{how} while {phase.name}"] += 1
        if any(work in batch.works for work in works for batch in self.scheduler.in_flight):
            self.seen[f"{how} in flight"] += 1

    def lifts(self) -> Callable[[str], None]:
        """Return what notes, behind a call, that it let those who wait in again."""
        roster = self.scheduler.roster
        barred, active = roster.waiting.barred, len(roster.active)

        def note(how: str) -> None:
            if barred and not roster.waiting.barred:
                self.seen[f"bar lifted by {how}"] += 1
                self.seen["bar lifted by the last active one"] += bool(active and not roster.active)

        return note

    # -- troubles

    def break_something(self) -> None:
        """Make the next op of some kind fail at submit."""
        kinds: tuple[type[Op], ...] = (CopyOut, CopyOut, CopyIn, CopyIn, CopyIn, ForkCopy, ForkCopy, StepBegin)
        kind = self.draw.choice(kinds)
        self.backend.fail_next(kind)
        self.script.append(f"# the next {kind.__name__} fails")

    def abort(self) -> None:
        """Give up the newest batch that was not launched, or the newest that was."""
        batches = self.planned or self.launched
        if batches:
            self.call("abort", batches.pop())
            self.seen["batch aborted"] += 1

    def change_weights(self) -> None:
        """Empty the prefix cache. The weights stay, so that what is expected stays."""
        self.manager.reset_prefix_cache()
        self.script.append("manager.reset_prefix_cache()")
        self.seen["weights changed"] += 1

    # -- the engine

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

    def schedule(self) -> None:
        """Schedule, and take what it says."""
        self.manager.asked = 0
        flying = [work for batch in self.scheduler.in_flight for work in batch.works]
        outcome = self.call("schedule")
        flight = len(self.scheduler.in_flight)
        self.seen.update(flags.of_schedule(outcome, self.scheduler.live, flying, flight))
        self.take(outcome.ended)
        if isinstance(outcome, Batch):
            self.planned.append(outcome)
        elif isinstance(outcome, Blocked):
            raise self.violation("progress", f"{outcome}; nobody else holds anything")
        elif isinstance(outcome, Idle) and not flight:
            self.idle = True
            self.check_empty()

    def launch(self) -> None:
        """Launch the batch that was planned."""
        batch = self.planned.popleft()
        before = batch.plan
        plan = self.call("promote", batch)
        if plan is None:
            self.seen["batch that no longer counts"] += 1
            return
        self.seen["plan promoted anew"] += plan is not before
        self.seen["launched one ahead"] += bool(self.launched)
        self.seen["fed a token in flight"] += any(entry.feeds is not None for entry in batch.entries)
        self.check_limits(batch)
        try:
            with self.manager.launch(plan):
                self.model.launch(batch, plan)
        except SubmitError:
            self.seen["launch failed"] += 1
            self.call("abort", batch)
        else:
            self.launched.append(batch)

    def update(self) -> None:
        """Give back what the oldest batch has sampled."""
        batch = self.launched.popleft()
        sampled = self.model.result(batch)
        lifted = self.lifts()
        done: Update = self.call("update", batch, sampled.tokens, sampled.logprobs)
        self.seen.update(flags.of_update(batch, done))
        if done.ended:
            lifted("finish")
        for work in done.advanced:
            self.check_so_far(work.output())
        self.take(done.ended)

    # -- checks

    def call(self, verb: str, *args: Any) -> Any:
        """Call the scheduler and write it down."""
        result = getattr(self.scheduler, verb)(*args)
        self.calls[verb] += 1
        self.script.append(f"{verb}({', '.join(map(in_words, args))})  # {in_words(result)}")
        return result

    def take(self, outputs: tuple[Output, ...]) -> None:
        """Check outputs that are final, and note them."""
        for output in outputs:
            life = self.lives.get(output.request)
            if life is None or output.sample in life.outputs:
                raise self.violation("output", f"{output} is nobody's, or the second one")
            life.outputs[output.sample] = output
            self.check_so_far(output)
            if output.finish in (Finish.LENGTH, Finish.STOP):
                self.seen[f"ended by {output.finish.name}"] += 1
                wanted = life.expected[output.sample]
                if (output.tokens, output.finish) != wanted:
                    raise self.violation("output", f"{output} should be {wanted}")
            elif output.finish is Finish.FAILED and output.error != "asked for":
                raise self.violation("output", f"{output.request} failed by itself: {output.error}")

    def check_so_far(self, output: Output) -> None:
        """Check that what was generated so far is the beginning of what must be."""
        tokens, _ = self.lives[output.request].expected[output.sample]
        if output.tokens != tokens[: len(output.tokens)]:
            raise self.violation("output", f"{output.request}[{output.sample}] has {output.tokens}, not {tokens}")
        if self.world.logprobs and output.logprobs != (tuple(map(logprob_of, output.tokens)) or None):
            raise self.violation("output", f"{output} has other log-probabilities")

    def check_limits(self, batch: Batch) -> None:
        """Check that no step takes too much, and that nothing is computed behind the last token that may be."""
        entries = batch.entries
        if sum(entry.span for entry in entries) > self.world.budget or len(entries) > self.world.batch:
            raise self.violation("limits", f"{in_words(batch)} is more than a step takes")
        for entry, work in zip(entries, batch.works, strict=True):
            if entry.start + entry.span >= work.limit:
                raise self.violation("limits", f"{entry} is behind the last token of {work}")

    def check_progress(self) -> None:
        """Count how long nobody got further than ever before."""
        now = {work.rank: work.generated + max(work.stored, work.stored_most) for work in self.scheduler.live}
        further = any(value > self.furthest.get(rank, 0) for rank, value in now.items())
        ended = any(rank not in now for rank in self.furthest)
        self.furthest = {rank: max(value, self.furthest.get(rank, 0)) for rank, value in now.items()}
        self.barren = 0 if further or ended or not now else self.barren + 1
        if self.barren > BARREN_MAX:
            raise self.violation("progress", f"nobody got further in {self.barren} turns: {self.scheduler.live}")

    def check_empty(self) -> None:
        """Check that every request was answered, and that nothing is held."""
        for life in self.lives.values():
            if len(life.outputs) != life.request.samples:
                raise self.violation("output", f"{life.request.id} ended with samples {list(life.outputs)} only")
        now = self.manager.view()
        if now.requests or now.leases or now.claims:
            raise self.violation("empty", f"idle, and there are {now.requests}, {now.leases}, {now.claims}")
        owned = [page for pools in (now.device, now.host) for pool in pools for page in pool.owners if page]
        if owned:
            raise self.violation("empty", f"idle, and {len(owned)} pages are owned")

    def violation(self, witness: str, detail: str) -> Violation:
        """Return what a person needs to see what happened."""
        script = "\n".join(self.script[-LINES:])
        return Violation(witness, f"{detail}\nin {self.world}\n{script}", ())


def in_words(value: Any) -> str:
    """Return an argument or result of a call as a person would note it."""
    if isinstance(value, GenerationRequest):
        return f"{value.id}: {len(value.prompt)}+{value.tokens_max}, {value.samples} samples"
    if isinstance(value, Batch):
        parts = [f"{w.key}@{value.start(p)}+{value.span(p)}" for p, w in enumerate(value.works)]
        others = [f"{d.request}[{d.sample}] {d.reason.name}" for d in value.decisions[len(value) :]]
        return f"batch {value.serial}: {', '.join(parts)}{'; ' * bool(others)}{', '.join(others)}"
    if isinstance(value, (Idle, InFlight, Blocked)):
        why = [f"{d.request}[{d.sample}] {d.reason.name}" for d in value.decisions]
        return f"{type(value).__name__} {', '.join(why)}"
    if isinstance(value, Update):
        return f"{[work.key for work in value.advanced]}, ended {[o.request for o in value.ended]}, late {value.late}"
    if isinstance(value, Output):
        return f"{value.request}[{value.sample}] {value.finish} after {len(value.tokens)}"
    if isinstance(value, Plan):
        return f"a plan{f', {list(value.sunk)} to the sink' * bool(value.sunk)}"
    if isinstance(value, tuple):
        return f"({', '.join(map(in_words, value))})"
    return str(value)
