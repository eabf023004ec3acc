"""Who is live: every sample of every request that was added and has not ended, and where it stands."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable

from kvstate.manager import KVManager
from kvstate.refusals import Refusal, TooLarge
from kvstate.scheduler.demand import largest_chunk, largest_fork, pages_at_most
from kvstate.scheduler.reasons import Notes, Reason
from kvstate.scheduler.requests import (
    Added,
    DuplicateRequest,
    EmptyPrompt,
    Finish,
    GenerationRequest,
    NothingToGenerate,
    Output,
    Phase,
    Work,
)
from kvstate.scheduler.waiting import Waiting
from kvstate.transitions.lifecycle import Ingested
from kvstate.types import MAIN


def _rank(work: Work) -> int:
    return work.rank


class Roster:
    """The live samples. Those that wait hold no device pages, active ones may.

    `notes` are decisions that no pass has told of yet.

    Attributes
    ----------
    live
        By the manager's id.
    active
        By arrival.
    changes
        Counts changes of who is active.
    """

    __slots__ = ("_clock", "_manager", "_ranks", "_samples", "active", "changes", "live", "notes", "waiting")

    def __init__(self, manager: KVManager, clock: Callable[[], float]) -> None:
        self._manager = manager
        self._clock = clock
        self._ranks = 0
        self._samples: dict[str, list[Work]] = {}
        self.live: dict[str, Work] = {}
        self.active: list[Work] = []
        self.waiting = Waiting()
        self.changes = 0
        self.notes: Notes = []

    def samples(self, id: str) -> tuple[Work, ...]:
        """Return the live samples of a request."""
        return tuple(work for work in self._samples.get(id, ()) if work.phase is not Phase.FINISHED)

    # -- added

    def add(self, request: GenerationRequest, budget: int) -> Added | Refusal:
        """Accept a request, or refuse it alone; see `Scheduler.add`."""
        if not request.prompt:
            return EmptyPrompt(request=request.id)
        if request.tokens_max < 1 or request.samples < 1:
            return NothingToGenerate(request=request.id, tokens_max=request.tokens_max, samples=request.samples)
        chunk = self._chunk(request, budget)
        if isinstance(chunk, Refusal):
            return chunk
        refusal = self._ingest(request)
        if refusal is not None:
            return refusal
        now_s = self._clock()
        works = [Work(request, sample, self._ranks + sample, chunk, now_s) for sample in range(request.samples)]
        self._ranks += request.samples
        self._samples[request.id] = works
        for work in works:
            self.live[work.key] = work
        for child in works[1:]:
            child.phase = Phase.FORKING
        works[0].children = works[1:]
        self.waiting.join(works[0])
        if request.tokens_max > 1 and request.samples > 1:
            fork = largest_fork(self._manager.geometry, len(request.prompt), request.samples, chunk)
            if fork:
                works[0].chunk = fork
            else:
                self.unfork(works[0])
        return Added(request.id)

    def _chunk(self, request: GenerationRequest, budget: int) -> int | Refusal:
        """Return the largest chunk with which a request can always be stored, alone at least."""
        geometry = self._manager.geometry
        retention = request.config.retention.get(MAIN) if request.config is not None else None
        tokens = (len(request.prompt), request.tokens_max)
        chunk = largest_chunk(geometry, *tokens, budget, retention)
        if chunk:
            return chunk
        wanted = geometry.sectors_for(pages_at_most(geometry, *tokens, 1, retention))
        return TooLarge(request=request.id, label=MAIN, wanted=wanted, capacity=geometry.pages)

    def _ingest(self, request: GenerationRequest) -> Refusal | None:
        """Ingest every sample, or none: an id that is live, here or elsewhere, is refused."""
        for place, key in enumerate(request.keys):
            if key in self.live or key in self._samples:
                answer: Ingested | Refusal = DuplicateRequest(request=request.id, id=key)
            else:
                answer = self._manager.ingest(key, request.config)
            if isinstance(answer, Ingested) and not answer.joined:
                continue
            for mine in request.keys[:place]:
                self._manager.remove(mine)
            return answer if isinstance(answer, Refusal) else DuplicateRequest(request=request.id, id=key)
        return None

    # -- ended

    def end_all(self, id: str, finish: Finish, error: str = "") -> tuple[Output, ...]:
        """End every live sample of a request, in whatever it is doing."""
        return tuple(self.end(work, finish, error) for work in self.samples(id))

    def end(self, work: Work, finish: Finish, error: str = "") -> Output:
        """End one sample; return what it has generated."""
        self._manager.remove(work.key)
        if work.phase is Phase.ACTIVE:
            self.active.remove(work)
            self.changes += 1
            unbar_after_end(self.waiting)
        else:
            self.waiting.leave(work)
        work.phase = Phase.FINISHED
        work.finish = finish
        work.error = error
        work.finished_s = self._clock()
        work.children = []
        del self.live[work.key]
        if not self.samples(work.request.id):
            del self._samples[work.request.id]
        return work.output()

    # -- from one place to another

    def activate(self, work: Work) -> None:
        """Make active what waited, or was forked just now."""
        self.waiting.leave(work)
        work.phase = Phase.ACTIVE
        if work.first_scheduled_s is None:
            work.first_scheduled_s = self._clock()
        insort(self.active, work, key=_rank)
        self.changes += 1

    def offloaded(self, work: Work) -> None:
        """Note that an active request has gone to the host: it waits at the tail.

        What is in flight for it was given up, so it goes on with its prompt, or feeds its last known token again.
        """
        self._deactivate(work)
        work.ahead = 0
        work.pending = False
        work.offloads += 1
        work.phase = Phase.OFFLOADED
        self.waiting.join(work)

    def begin_again(self, work: Work) -> None:
        """Note that the manager has reset a request (soft reset): it waits at the tail, with all its tokens to compute.

        Its own output, its age, its timings and the samples to be forked from it stay.
        """
        self._deactivate(work)
        work.soft_reset()
        self.waiting.join(work)

    def restart(self, work: Work) -> None:
        """Note that the manager has reset the only active request, which goes on, alone, from its first token.

        Nobody is admitted beside it: their pages would come between its own as they did before.
        """
        work.soft_reset()
        work.phase = Phase.ACTIVE
        work.anew = True
        self.changes += 1
        self.waiting.barred = True

    def unfork(self, work: Work) -> None:
        """Let the samples that were to be forked from `work` wait for a start of their own."""
        children, work.children = work.children, []
        for child in children:
            child.phase = Phase.WAITING
            self.waiting.join(child)
            self.notes.append((child, Reason.FORK_TOO_LARGE, None))

    def take_notes(self) -> Notes:
        """Return what was decided since this was called last."""
        notes, self.notes = self.notes, []
        return notes

    def _deactivate(self, work: Work) -> None:
        if work.phase is Phase.ACTIVE:
            self.active.remove(work)
            self.changes += 1
        else:
            self.waiting.leave(work)


def unbar_after_end(waiting: Waiting) -> None:
    """Admit again: an active request finished, was cancelled or failed, so pages came free that nobody starves for."""
    waiting.barred = False
