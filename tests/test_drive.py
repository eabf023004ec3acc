"""A driven workload finishes exactly, on one thread and on three; and the drive sees what goes wrong."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from kvstate.errors import Poisoned
from kvstate.manager import KVManager
from kvstate.ops import CopyIn, ForkCopy, Op, StepEnd
from kvstate.ordering import NOTHING
from kvstate.refusals import PagesExhausted
from kvstate.state import Lease
from kvstate.testing import drive as driving
from kvstate.testing.drive import CannotPreempt, MeteredJudge, Report, Stuck, Undecided, drive, peak_demand, pool_pages
from kvstate.testing.drive import crew as crews
from kvstate.testing.drive import planner as planning
from kvstate.testing.drive.jobs import BEAM, Job, Style, in_words, jobs_of, pages_needed, style_of
from kvstate.testing.drive.model import Launcher
from kvstate.testing.memory import MemoryBackend
from kvstate.transitions import offload
from kvstate.transitions.lifecycle import Emptied
from kvstate.transitions.step import Committed
from kvstate.types import MAIN, Geometry
from kvstate.workload import TraceRequest, WorkloadError, synthetic

PAGE_SIZE = 4
BATCH = 6
WORKLOAD = synthetic(20, seed=3, prompt_tokens=(4, 60), output_tokens=(4, 40), rate_per_s=2.0)
DEMAND = peak_demand(WORKLOAD, page_size=PAGE_SIZE, batch=BATCH)

both = pytest.mark.parametrize("threads", [False, True], ids=["one thread", "three threads"])


def serve(
    workload: Sequence[TraceRequest] = WORKLOAD,
    *,
    fraction: float = 0.2,
    pages: int | None = None,
    host_pages: int = DEMAND,
    backend: type[MemoryBackend] = MemoryBackend,
    judged: bool = True,
    **options: Any,
) -> Report:
    if pages is None:
        pages = pool_pages(workload, page_size=PAGE_SIZE, batch=BATCH, fraction=fraction)
    geometry = Geometry(pages=pages, page_size=PAGE_SIZE, host_pages=host_pages)
    judge = MeteredJudge(PAGE_SIZE, MemoryBackend.sinks_of(geometry)) if judged else None
    memory = backend(geometry, judge=judge)
    return drive(workload, geometry, memory, judge=judge, **{"chunk": 24, "batch": BATCH, **options})


# -- what a run shows


@both
def test_under_preemption_every_request_finishes_exactly_and_idle_means_empty(threads: bool) -> None:
    report = serve(threads=threads)
    assert report.holds
    assert report.finished == len(WORKLOAD) and report.unfinished == ()
    assert (report.content_errors, report.conflicts, report.leaks) == (0, (), ())
    assert report.reloads == report.preemptions and report.pages_out == report.pages_in
    assert report.tokens_prefilled == sum(request.prompt_tokens for request in WORKLOAD)
    if not threads:  # how much is preempted depends on who is first
        assert report.preemptions >= 5 and report.pages_out > 0
        assert report.refused["admit: PagesExhausted"] > 0
    assert report.forks >= 3


def test_steps_are_planned_ahead_and_refused_drafts_void_what_was_planned_on_them() -> None:
    report = serve(fraction=1.0)
    assert report.planned_ahead > report.steps // 2
    assert report.voided > 0
    assert report.holds


def test_contents_do_not_depend_on_threads_pools_chunks_or_arrivals() -> None:
    digests = {
        serve(threads=threads, fraction=fraction, chunk=chunk, speed=speed).digest
        for threads, fraction, chunk, speed in (
            (False, 0.2, 24, None),
            (True, 0.2, 24, None),
            (True, 0.3, 7, 2.0),
            (False, 1.0, 1000, 1.0),
        )
    }
    assert len(digests) == 1


def test_other_contents_have_another_digest() -> None:
    assert serve().digest != serve(WORKLOAD[:-1]).digest


def test_one_thread_repeats_itself() -> None:
    one, two = serve(), serve()
    assert (one.steps, one.preemptions, one.voided, one.refused) == (
        two.steps,
        two.preemptions,
        two.voided,
        two.refused,
    )


@both
def test_a_pool_of_the_peak_demand_never_preempts(threads: bool) -> None:
    report = serve(fraction=1.0, host_pages=0, threads=threads)
    assert report.holds and report.preemptions == 0


@both
def test_a_full_host_pool_makes_requests_begin_again(threads: bool) -> None:
    report = serve(host_pages=3, threads=threads)
    assert report.holds
    if not threads:  # who is preempted, and when, depends on who is first
        assert report.recomputed > 0
        assert report.refused["claim_offload: HostExhausted"] > 0
        assert report.tokens_prefilled > sum(request.prompt_tokens for request in WORKLOAD)


@both
def test_without_a_host_pool_a_run_that_must_preempt_says_so(threads: bool) -> None:
    with pytest.raises(CannotPreempt, match=r"There is no host pool.*--host-pages.*running") as caught:
        serve(host_pages=0, threads=threads)
    assert "free pages" in str(caught.value)


def test_arrivals_take_virtual_time_only_when_a_speed_is_given() -> None:
    last_s = WORKLOAD[-1].arrival_s
    assert serve().virtual_s == 0.0
    slow, fast = serve(speed=1.0), serve(speed=4.0)
    assert slow.holds and fast.holds
    assert slow.virtual_s >= last_s and fast.virtual_s >= last_s
    assert fast.steps < slow.steps


def test_a_request_larger_than_the_pool_is_refused_before_anything_runs() -> None:
    with pytest.raises(WorkloadError, match=r"synthetic\(seed=3\):\d+: request r\d+ needs"):
        serve(pages=3)


def test_a_fork_that_does_not_fit_is_left_out() -> None:
    largest = max(-(-(r.prompt_tokens + r.output_tokens) // PAGE_SIZE) for r in WORKLOAD)
    assert serve(pages=largest).forks < serve().forks


def test_progress_is_told_and_ends_at_the_last_request() -> None:
    told: list[tuple[int, int]] = []
    report = serve(progress=lambda finished, steps: told.append((finished, steps)))
    assert told == sorted(told)
    assert told[-1] == (len(WORKLOAD), report.steps)


# -- what a run sees


class LosesCopies(MemoryBackend):
    """Spoils what was copied back in."""

    kind: type[Op] = CopyIn

    def submit(self, op: Op) -> None:
        super().submit(op)
        if isinstance(op, CopyIn | ForkCopy) and isinstance(op, self.kind):
            for group, copies in enumerate(op.copies):
                self.poison(op.target_tier, group, [target for _, target, _ in copies])


class LosesForks(LosesCopies):
    """Spoils the last page of a fork."""

    kind = ForkCopy


@pytest.mark.parametrize("backend", [LosesCopies, LosesForks])
@both
def test_a_lost_copy_is_a_content_error_that_names_stream_and_token(
    backend: type[MemoryBackend], threads: bool
) -> None:
    report = serve(backend=backend, threads=threads, judged=False)
    assert not report.holds
    assert report.content_errors > 0 and report.unfinished
    assert any("expected r" in error and "found POISON" in error for error in report.errors), report.errors
    assert all(error.startswith("r") and "token" in error for error in report.errors)


def test_a_missing_edge_is_a_conflict_though_the_contents_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "elsewhere", lambda after, queue: NOTHING)
    report = serve()
    assert report.content_errors == 0
    assert report.conflicts and "CopyOut" in report.conflicts[0]
    assert not report.holds


def test_without_a_judge_nothing_is_said_about_conflicts() -> None:
    report = serve(judged=False)
    assert report.conflicts is None and report.judge_s == 0.0
    assert report.holds


def test_what_is_left_at_the_end_is_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVManager, "remove", lambda self, request: Emptied(request, 0, 0))
    report = serve(WORKLOAD[:2], fraction=1.0)
    assert not report.holds
    assert report.leaks[0].startswith("device has ") and report.leaks[1] == "2 requests are open"


# -- what never hangs


def test_a_run_that_cannot_admit_anything_is_stuck_and_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVManager, "admit", lambda self, step: PagesExhausted(request="r0", short=(1,)))
    with pytest.raises(
        Stuck, match=r"20 waiting; nobody holds pages; free pages .* last refusal: PagesExhausted \(r0\)"
    ):
        serve()


def test_a_run_that_stores_no_token_is_stuck_and_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def drops_all(self: KVManager, lease: Lease, accepted: object = None) -> Committed:
        self.abort(lease)
        return Committed(lease, None, tuple(range(len(lease.step.segments))))

    monkeypatch.setattr(KVManager, "commit", drops_all)
    monkeypatch.setattr(planning, "BARREN_MAX", 2)
    monkeypatch.setattr(Job, "ended", _forget_pending)
    with pytest.raises(Stuck, match="41 steps and moves stored no token"):
        serve()


def _forget_pending(self: Job, part: object, start: int, stored: int | None) -> None:
    self.leases -= 1
    self.pending.clear()


@both
def test_an_error_of_the_backend_ends_the_run(threads: bool) -> None:
    class Breaks(MemoryBackend):
        def submit(self, op: Op) -> None:
            if isinstance(op, StepEnd) and op.number > 40:
                raise RuntimeError("the device is on fire")
            super().submit(op)

    with pytest.raises(Poisoned, match="on fire"):
        serve(backend=Breaks, threads=threads)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvstate-")]


def test_threads_that_stop_answering_leave_the_run_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(crews, "PATIENCE_S", 0.05)
    monkeypatch.setattr(Launcher, "launch", lambda self, planned: released.wait())
    monkeypatch.setattr(crews.Threads, "close", lambda self: released.set())
    with pytest.raises(Undecided, match="may be deadlocked"):
        serve(threads=True)


# -- the script


def test_the_final_content_of_a_label_follows_its_last_fork() -> None:
    request = TraceRequest("r0", 0.0, 5, 30, (), "here:1")
    post, pre = Job(request, 8, Style.POST_FORK), Job(request, 0, Style.PRE_FORKS)
    assert post.final(MAIN) == post.stamps(MAIN, 0, 35)
    assert post.final(BEAM) == post.stamps(MAIN, 0, 5) + post.stamps(BEAM, 5, 35)
    assert pre.final(BEAM) == pre.stamps(MAIN, 0, 29) + pre.stamps(BEAM, 29, 35)


def test_stamps_name_request_label_position_and_refusal() -> None:
    jobs = jobs_of(WORKLOAD[:3], page_size=PAGE_SIZE, pages=1000)
    stamps = [stamp for job in jobs for label in (MAIN, BEAM) for stamp in job.stamps(label, 0, 9, accepted=7)]
    assert len(set(stamps)) == len(stamps) == 54
    assert in_words(jobs[1].stamps(BEAM, 7, 8)[0], jobs) == "r1/beam token 7"
    assert in_words(jobs[2].stamps(MAIN, 7, 8, accepted=0)[0], jobs) == "the refused draft of r2/main token 7"
    assert in_words(-1, jobs) == "-1"


def test_some_requests_fork_and_some_draft() -> None:
    styles = [style_of(index) for index in range(32)]
    assert [styles.count(style) for style in Style] == [20, 8, 2, 2]


def test_no_pool_is_smaller_than_its_largest_request_with_its_fork() -> None:
    largest = max(pages_needed(request, style_of(i), PAGE_SIZE) for i, request in enumerate(WORKLOAD))
    assert pool_pages(WORKLOAD, page_size=PAGE_SIZE, batch=BATCH, fraction=0.001) == largest
    assert pool_pages(WORKLOAD, page_size=PAGE_SIZE, batch=BATCH, fraction=1.0) == DEMAND
    assert driving.peak_demand(WORKLOAD, page_size=PAGE_SIZE, batch=1) == largest
