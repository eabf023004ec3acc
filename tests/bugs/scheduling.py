"""A scheduler over a manager in memory, step by step, and programs that a mutant of the scheduler must fail."""

from __future__ import annotations

from collections import deque
from typing import Any

from kvstate.eviction import Starved, relieve
from kvstate.manager import KVManager
from kvstate.ops import CopyIn, Op
from kvstate.scheduler import Scheduler
from kvstate.scheduler.batch import Batch, Update
from kvstate.scheduler.reasons import Reason
from kvstate.scheduler.requests import Added, GenerationRequest, Output
from kvstate.testing.engine import StampModel, expected
from kvstate.testing.judge import EdgeJudge
from kvstate.testing.memory import MemoryBackend, nobodys
from kvstate.types import Geometry, Segment, Step, StreamFork, StreamId
from tests.steps import store

EVICTED = (Reason.OFFLOADED, Reason.RESET_HOST_FULL, Reason.RESET_NO_HOST, Reason.RESET_COPY_FAILED)


class Serving:
    """An engine with a pool of `pages` of 2 tokens; `outputs` are final, `evicted` and `restored` say who, in order."""

    def __init__(self, pages: int, host_pages: int = 99, page_size: int = 2, **options: Any) -> None:
        self.geometry = Geometry(pages=pages, page_size=page_size, host_pages=host_pages)
        self.judge = EdgeJudge.of(self.geometry)
        self.backend = MemoryBackend(self.geometry, judge=self.judge)
        self.manager = KVManager(self.geometry, self.backend, debug=True)
        self.scheduler = Scheduler(self.manager, clock=lambda: 0.0, **options)
        self.model = StampModel(self.backend, self.geometry)
        self.requests: dict[str, GenerationRequest] = {}
        self.launched: deque[Batch] = deque()
        self.outputs: dict[tuple[str, int], Output] = {}
        self.evicted: list[str] = []
        self.restored: list[str] = []
        self.batches: list[Batch] = []

    def add(self, id: str, prompt: int, tokens_max: int, **more: Any) -> Any:
        """Add a request with a prompt of so many tokens."""
        request = GenerationRequest(id, tuple(range(prompt)), tokens_max, **more)
        added = self.scheduler.add(request)
        if isinstance(added, Added):
            self.requests[id] = request
        return added

    def schedule(self) -> Any:
        """Schedule, and launch if that gives a batch."""
        outcome = self.scheduler.schedule()
        self.take(outcome.ended)
        for decision in outcome.decisions:
            if decision.reason in EVICTED:
                self.evicted.append(decision.request)
            elif decision.reason is Reason.RESTORED:
                self.restored.append(decision.request)
        if isinstance(outcome, Batch):
            self.batches.append(outcome)
            plan = self.scheduler.promote(outcome)
            if plan is not None:
                with self.manager.launch(plan):
                    self.model.launch(outcome, plan)
                self.launched.append(outcome)
        self.spoil()
        return outcome

    def update(self) -> Update:
        """Update the oldest batch."""
        batch = self.launched.popleft()
        done = self.scheduler.update(batch, self.model.result(batch).tokens)
        self.take(done.ended)
        self.spoil()
        return done

    def cancel(self, id: str) -> tuple[Output, ...]:
        """Cancel a request."""
        return self.take(self.scheduler.cancel(id))

    def fail(self, id: str) -> tuple[Output, ...]:
        """Fail a request."""
        return self.take(self.scheduler.fail(id, "asked for"))

    def take(self, outputs: tuple[Output, ...]) -> tuple[Output, ...]:
        """Note what is final."""
        for output in outputs:
            self.outputs[output.request, output.sample] = output
        return outputs

    def step(self) -> Any:
        """Schedule and launch as far ahead as is allowed, then update."""
        outcome = self.schedule()
        if isinstance(outcome, Batch) and self.scheduler.asynchronous and len(self.launched) == 1:
            outcome = self.schedule()
        if self.launched:
            self.update()
        return outcome

    def until(self, what: Any, steps: int = 200) -> None:
        """Step until `what` is true."""
        for _ in range(steps):
            if what():
                return
            self.step()
        raise AssertionError(f"not within {steps} steps: {self.scheduler.live}")

    def run(self) -> None:
        """Step until nothing is live; then every output must be right and nothing may be held."""
        self.until(lambda: not self.scheduler.live and not self.launched)
        for request in self.requests.values():
            for sample, (tokens, finish) in enumerate(expected(request, self.geometry)):
                output = self.outputs[request.id, sample]
                if output.finish is not None and output.finish.value in ("length", "stop"):
                    assert (output.tokens, output.finish) == (tokens, finish)
                else:
                    assert output.tokens == tokens[: len(output.tokens)]
        now = self.manager.view()
        assert not (now.requests or now.leases or now.claims)
        assert not any(owners for pool in (*now.device, *now.host) for owners in pool.owners)
        assert not self.judge.violations

    def spoil(self) -> None:
        """Spoil what nobody owns."""
        for tier, group, pages in nobodys(self.manager.view()):
            self.backend.poison(tier, group, pages)

    def work(self, id: str, sample: int = 0) -> Any:
        """Return what the scheduler knows of a live sample."""
        [found] = [w for w in self.scheduler.live if (w.request.id, w.sample) == (id, sample)]
        return found


# -- programs


def the_restored_one_is_not_the_victim_again() -> None:
    """Q5: b leaves and comes back; when it starves again with the newer c, c is the one to leave."""
    serving = Serving(pages=7)
    serving.add("a", 3, 5)
    serving.add("b", 3, 12)
    serving.add("c", 2, 12)
    serving.run()
    assert serving.evicted == ["b", "c"], serving.evicted
    assert serving.restored[0] == "b"


def a_victim_that_frees_nothing_stays() -> None:
    """O13: all pages of v are shared with somebody who stays, so w leaves, although v is newer."""
    geometry = Geometry(pages=4, page_size=2, host_pages=4)
    manager = KVManager(geometry, MemoryBackend(geometry), debug=True)
    for request in ("stays", "w", "v"):
        manager.ingest(request)
    store(manager, Segment("stays", span=4), forks=(StreamFork(StreamId("stays"), StreamId("v")),))
    store(manager, Segment("w", span=4))
    relief = relieve(manager, [Starved("w", 1, Segment("w")), Starved("v", 2, Segment("v"))], active=3)
    assert [(verdict.request, verdict.reason) for verdict in relief.verdicts] == [
        ("v", Reason.NO_GAIN),
        ("w", Reason.OFFLOADED),
    ]


def the_last_active_one_stays() -> None:
    """Nobody would be left to run: who is alone waits for pages that others hold."""
    geometry = Geometry(pages=2, page_size=2, host_pages=2)
    manager = KVManager(geometry, MemoryBackend(geometry), debug=True)
    for request in ("alone", "foreign"):
        manager.ingest(request)
    store(manager, Segment("alone", span=2), Segment("foreign", span=2))
    relief = relieve(manager, [Starved("alone", 1, Segment("alone"))], active=1)
    assert [verdict.reason for verdict in relief.verdicts] == [Reason.LAST_ACTIVE]


def those_who_share_all_their_pages_leave_together() -> None:
    """O13: two prompts with two samples each fill the pool; alone, nobody who leaves would free a page."""
    serving = Serving(pages=8, page_size=1)
    serving.add("a", 4, 5, samples=2)
    serving.add("b", 4, 5, samples=2)
    serving.step()
    assert [serving.manager.gain(key) for key in ("a", "a#1", "b", "b#1")] == [0, 0, 0, 0]
    serving.step()
    assert serving.evicted == ["b", "b"]
    serving.run()


class Impatient(KVManager):
    """A manager that is asked for a reload a few times only."""

    asked = 0

    def claim_reload(self, request: str, extra: Step | None = None) -> Any:
        """Claim, and count."""
        self.asked += 1
        assert self.asked < 20, "the same reload again and again"
        return super().claim_reload(request, extra)


def a_copy_that_always_fails_is_given_up() -> None:
    """No page ever comes back from the host: who is there computes its tokens again in the end."""
    serving = Serving(pages=5)
    serving.manager.__class__ = Impatient
    serving.backend.fail = no_copy_in
    serving.add("a", 3, 6)
    serving.add("b", 3, 6)
    serving.run()
    assert serving.evicted == ["b"] and not serving.restored


def no_copy_in(op: Op) -> bool:
    """Fail every copy from the host."""
    return isinstance(op, CopyIn)


def nothing_is_computed_behind_the_last_token() -> None:
    """One ahead: a step is only prepared for a request that may have another token than the one in flight."""
    serving = Serving(pages=20, asynchronous=True)
    serving.add("a", 3, 4)
    serving.add("b", 5, 7)
    serving.run()
    for batch in serving.batches:
        for entry in batch.entries:
            request = serving.requests[entry.request]
            assert entry.start + entry.span < len(request.prompt) + request.tokens_max
