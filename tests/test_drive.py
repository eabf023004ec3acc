"""A served workload generates exactly its tokens, in every way to serve it; and the drive sees what goes wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest

from kvstate import prefix
from kvstate.errors import KVStateError, Poisoned
from kvstate.manager import KVManager
from kvstate.ops import CopyIn, ForkCopy, Op, Plan, StepEnd
from kvstate.ordering import NOTHING
from kvstate.refusals import PagesExhausted
from kvstate.scheduler.loop import Sampled
from kvstate.scheduler.requests import GenerationRequest
from kvstate.testing.drive import (
    MeteredJudge,
    Report,
    Stopped,
    Undecided,
    drive,
    peak_demand,
    pool_pages,
    samples_of,
    stamps_read,
    threads,
)
from kvstate.testing.drive.chain import GENESIS, Scripts, chain, draw
from kvstate.testing.drive.model import ChainModel
from kvstate.testing.memory import MemoryBackend
from kvstate.transitions import offload
from kvstate.transitions import prefix as keying
from kvstate.transitions.lifecycle import Emptied
from kvstate.types import Geometry, Group
from kvstate.workload import TraceRequest, WorkloadError, synthetic

from .breakages import forgetful_drop, uncounted_sharing

PAGE_SIZE = 4
BATCH = 6
CHUNK = 24
WORKLOAD = synthetic(20, seed=3, prompt_tokens=(10, 90), output_tokens=(8, 50), rate_per_s=2.0)
FORKED = [index for index in range(len(WORKLOAD)) if samples_of(index) > 1]
ONE = (Group(),)
WINDOWED = (Group("full", 256), Group("local", 128, window=9))

MODES: dict[str, dict[str, bool]] = {
    "step by step": {},
    "one ahead": {"asynchronous": True},
    "two threads": {"threads": True},
}
every_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())


def demand_of(groups: Sequence[Group] = ONE, workload: Sequence[TraceRequest] = WORKLOAD, **options: Any) -> int:
    sizes = Geometry(pages=1, page_size=PAGE_SIZE, groups=groups)
    return peak_demand(workload, sizes, **{"chunk": CHUNK, "batch": BATCH, **options})


def serve(
    workload: Sequence[TraceRequest] = WORKLOAD,
    *,
    groups: Sequence[Group] = ONE,
    fraction: float = 0.25,
    pages: int | None = None,
    host_pages: int | None = None,
    page_size: int = PAGE_SIZE,
    backend: Callable[..., MemoryBackend] = MemoryBackend,
    judged: bool = True,
    **options: Any,
) -> Report:
    geometry = Geometry(pages=pages or 1, page_size=page_size, groups=groups)
    options = {"chunk": CHUNK, "batch": BATCH, **options}
    demand = peak_demand(workload, geometry, chunk=options["chunk"], batch=options["batch"])
    if pages is None:
        pages = pool_pages(workload, geometry, demand=demand, chunk=options["chunk"], fraction=fraction)
    geometry = attrs.evolve(geometry, pages=pages, host_pages=demand if host_pages is None else host_pages)
    judge = MeteredJudge.of(geometry) if judged else None
    return drive(workload, geometry, backend(geometry, judge=judge), judge=judge, **options)


def counts_of(report: Report) -> dict[str, Any]:
    """Everything but times."""
    return {name: value for name, value in attrs.asdict(report).items() if not name.endswith("_s")}


# -- what a run shows


@every_mode
@pytest.mark.parametrize("groups", [ONE, WINDOWED], ids=["one group", "two groups"])
@pytest.mark.parametrize("prefix_cache", [False, True], ids=["", "prefix cache"])
def test_under_eviction_every_request_generates_its_tokens_and_idle_means_empty(
    mode: dict[str, bool], groups: Sequence[Group], prefix_cache: bool
) -> None:
    report = serve(groups=groups, prefix_cache=prefix_cache, **mode)
    assert report.holds, report
    assert report.finished == report.requests == len(WORKLOAD)
    assert (report.content_errors, report.errors, report.conflicts, report.leaks) == (0, (), (), ())
    assert report.offloads == report.reloads >= 3 and report.pages_out >= report.pages_in > 0
    assert report.refused["starved: PagesExhausted"] >= report.offloads > 0
    assert 0 < report.submissions <= report.offloads + report.reloads
    assert report.forks == len(FORKED)


@pytest.mark.parametrize("groups", [ONE, WINDOWED], ids=["one group", "two groups"])
def test_what_is_generated_depends_on_nothing_but_the_prompts(groups: Sequence[Group]) -> None:
    ways: list[dict[str, Any]] = [
        {"fraction": 1.0},
        {"fraction": 0.125},
        {"fraction": 0.125, "host_pages": 0},
        {"threads": True, "host_pages": 9, "prefix_cache": True},
        {"asynchronous": True, "chunk": 7, "speed": 2.0, "sampled": True},
        {"chunk": 1000, "batch": 2, "speed": 1.0, "prefix_cache": True},
    ]
    reports = [serve(groups=groups, **way) for way in ways]
    assert all(report.holds for report in reports)
    assert len({report.digest for report in reports}) == 1
    assert len({report.steps for report in reports}) > 1


def test_other_prompts_generate_something_else() -> None:
    assert serve().digest != serve(WORKLOAD[:-1]).digest


@pytest.mark.parametrize("asynchronous", [False, True])
def test_one_thread_repeats_itself(asynchronous: bool) -> None:
    ways = {"asynchronous": asynchronous, "prefix_cache": True, "host_pages": 20}
    assert counts_of(serve(**ways)) == counts_of(serve(**ways))


@every_mode
def test_all_the_memory_of_the_peak_demand_evicts_nobody(mode: dict[str, bool]) -> None:
    report = serve(pages=demand_of(asynchronous=bool(mode)), host_pages=0, **mode)
    assert report.holds
    assert (report.offloads, report.soft_resets, report.tokens_recomputed) == (0, 0, 0)
    assert report.tokens_prefilled == report.prompt_tokens == sum(request.prompt_tokens for request in WORKLOAD)
    # Each sample's first token is drawn with the prompt, and its last one is never stored.
    generated = sum((request.output_tokens - 1) * samples_of(index) for index, request in enumerate(WORKLOAD))
    assert report.tokens_decoded == generated


@every_mode
@pytest.mark.parametrize("host_pages", [0, 12])
def test_without_room_on_the_host_requests_begin_again_and_everything_finishes(
    host_pages: int, mode: dict[str, bool]
) -> None:
    report = serve(host_pages=host_pages, **mode)
    assert report.holds
    assert report.soft_resets > 0 and report.tokens_recomputed > 0
    why = "reset_host_full: HostExhausted" if host_pages else "reset_no_host: NoHostPool"
    assert report.refused[why] == report.soft_resets
    assert (report.pages_out > 0) == (host_pages > 0)


def test_a_step_ahead_is_sometimes_in_vain() -> None:
    report = serve(asynchronous=True)
    assert report.voided >= report.tokens_late > 0
    assert serve().voided == 0


def test_equal_beginnings_are_found_in_the_prefix_cache() -> None:
    shared = synthetic(6, seed=1, prompt_tokens=(1100, 1600), output_tokens=(2, 9), shared_prefix_share=1.0)
    ways: dict[str, Any] = {"page_size": 16, "chunk": 2048, "fraction": 1.0}
    without, found = serve(shared, **ways), serve(shared, prefix_cache=True, **ways)
    assert without.holds and found.holds and without.digest == found.digest
    assert without.hit_rate == 0.0 and found.hit_rate > 0.3
    assert found.tokens_cached + found.tokens_prefilled == found.prompt_tokens
    assert found.leaks == ()


def test_arrivals_take_virtual_time_only_when_a_speed_is_given() -> None:
    last_s = WORKLOAD[-1].arrival_s
    assert serve().virtual_s == 0.0
    slow, fast = serve(speed=1.0), serve(speed=4.0)
    assert slow.holds and fast.holds
    assert slow.virtual_s >= last_s and fast.virtual_s >= last_s
    assert fast.steps < slow.steps


def test_progress_is_told_and_ends_at_the_last_sample() -> None:
    told: list[tuple[int, int]] = []
    report = serve(progress=lambda ended, steps: told.append((ended, steps)))
    assert told == sorted(told)
    assert told[-1] == (len(WORKLOAD) + len(FORKED), report.steps)


@pytest.mark.parametrize("groups", [ONE, WINDOWED], ids=["one group", "two groups"])
def test_a_request_larger_than_the_pool_is_refused_before_anything_runs(groups: Sequence[Group]) -> None:
    with pytest.raises(WorkloadError, match=r"synthetic\(seed=3\):\d+: request r\d+ needs \d+ (pages|sectors)"):
        serve(groups=groups, pages=3)


# -- how much is compared


def test_sampling_compares_less_and_generates_the_same() -> None:
    everything, sampled = serve(), serve(sampled=True)
    assert everything.holds and sampled.holds
    assert sampled.digest == everything.digest
    assert 0 < sampled.stamps_compared < everything.stamps_compared / 2


def test_what_comparing_everything_reads_is_known_before() -> None:
    for groups in (ONE, (Group("full", 256), Group("also", 128))):
        geometry = Geometry(pages=1, page_size=PAGE_SIZE, groups=groups)
        reads = serve(groups=groups, fraction=1.0).stamps_compared
        assert reads / 2 < stamps_read(WORKLOAD, geometry) < reads * 2


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


class CopiesNothing(MemoryBackend):
    """Leaves the device pages of a reload as they are: perhaps even with the right bytes, if nobody spoils them."""

    def submit(self, op: Op) -> None:
        super().submit(attrs.evolve(op, copies=((),)) if isinstance(op, CopyIn) else op)


class WritesWrong(MemoryBackend):
    """Gets a few tokens wrong, in the middle of a run: one alone may belong to a segment that is given up."""

    writes = 0

    def write(self, plan: Plan, place: int, stamps: Sequence[Any]) -> None:
        self.writes += 1
        wrong = 200 <= self.writes < 210
        super().write(plan, place, [*stamps[:-1], stamps[-1] + 1] if wrong else stamps)


@pytest.mark.parametrize("backend", [LosesCopies, LosesForks, CopiesNothing, WritesWrong])
@pytest.mark.parametrize("sampled", [False, True], ids=["all", "sampled"])
@every_mode
def test_a_wrong_page_is_a_content_error_that_names_request_and_token(
    backend: type[MemoryBackend], sampled: bool, mode: dict[str, bool]
) -> None:
    report = serve(backend=backend, judged=False, sampled=sampled, **mode)
    assert not report.holds
    assert report.content_errors > 0 and report.unfinished
    assert any("of group 0: expected its own stamp, found " in error for error in report.errors), report.errors
    # What is generated behind it is another text: the model goes on from what it has read.
    assert any("has generated another token" in error for error in report.errors) or report.content_errors > 20


def test_a_page_of_somebody_else_is_told_apart() -> None:
    class Swaps(MemoryBackend):
        def submit(self, op: Op) -> None:
            if isinstance(op, CopyIn) and len(op.copies[0]) > 2:
                (source, *sources), targets = op.copies[0].sources, op.copies[0].targets  # type: ignore[attr-defined]
                copies = attrs.evolve(op.copies[0], sources=[*sources, source], targets=targets)  # type: ignore[misc]
                op = attrs.evolve(op, copies=(copies,))
            super().submit(op)

    report = serve(backend=Swaps, judged=False)
    assert any("found that of token" in error for error in report.errors), report.errors


def test_a_prefix_cache_that_mixes_prompts_up_is_a_content_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(parent: bytes, tokens: Sequence[int]) -> bytes:
        return prefix_chain(parent, [len(tokens)])

    prefix_chain = prefix.chain
    for module in (prefix, keying):
        monkeypatch.setattr(module, "chain", forgetful)
    report = serve(prefix_cache=True)
    assert report.tokens_cached > 0
    assert report.content_errors > 0 and report.unfinished


def test_another_token_than_with_all_memory_is_an_error_though_every_page_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A scheduler that hands a token out twice, say: the last one of a request is fed to nobody."""
    take = ChainModel.result

    def other(self: ChainModel, batch: Any) -> Sampled:
        tokens = list(take(self, batch).tokens)
        for place, work in enumerate(batch.works):
            if work.request.id == "r5" and len(work.tokens) == work.limit - 1 and len(tokens) == len(batch.works):
                tokens[place] += 1
        return Sampled(tokens)

    monkeypatch.setattr(ChainModel, "result", other)
    report = serve()
    assert report.unfinished == ("r5",)
    [error] = report.errors
    assert error == f"r5 has generated another token {WORKLOAD[5].output_tokens - 1} than with all memory"


def test_a_missing_edge_is_a_conflict_though_the_contents_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "elsewhere", lambda after, queue: NOTHING)
    report = serve()
    assert report.content_errors == 0
    assert report.conflicts and "CopyOut" in report.conflicts[0]
    assert not report.holds


def test_a_machine_that_forgets_uses_is_noticed_by_the_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    forgetful_drop(monkeypatch)
    report = serve()
    assert report.conflicts and not report.holds


def test_a_machine_that_counts_no_sharing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    uncounted_sharing(monkeypatch)
    with pytest.raises(KVStateError, match="page"):
        serve()


def test_without_a_judge_nothing_is_said_about_conflicts() -> None:
    report = serve(judged=False)
    assert report.conflicts is None and report.judge_s == 0.0
    assert report.holds


def test_what_is_left_at_the_end_is_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVManager, "remove", lambda self, request: Emptied(request, 0, 0))
    report = serve(WORKLOAD[:2], fraction=1.0)
    assert not report.holds
    assert report.leaks[0].startswith("device has ") and report.leaks[1] == "3 requests are open"


# -- what never hangs


def test_a_run_in_which_nothing_can_run_is_stopped_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = PagesExhausted(request="r0", short=(1,))
    monkeypatch.setattr(KVManager, "admit", lambda self, step: refusal)
    monkeypatch.setattr(KVManager, "probe", lambda self, step, leaving=False: refusal)
    with pytest.raises(Stopped, match=r"nothing can run and nothing is in flight: PagesExhausted \(r0\)"):
        drive(WORKLOAD, Geometry(pages=99, page_size=PAGE_SIZE), MemoryBackend(Geometry(pages=99, page_size=PAGE_SIZE)))


@every_mode
def test_an_error_of_the_backend_ends_the_run(mode: dict[str, bool]) -> None:
    class Breaks(MemoryBackend):
        def submit(self, op: Op) -> None:
            if isinstance(op, StepEnd) and op.number > 40:
                raise RuntimeError("the device is on fire")
            super().submit(op)

    with pytest.raises(Poisoned, match="on fire"):
        serve(backend=Breaks, **mode)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvstate-")]


def test_a_model_that_stops_answering_leaves_the_run_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(threads, "PATIENCE_S", 0.05)
    monkeypatch.setattr(ChainModel, "compute", lambda self, job, plan: released.wait())
    monkeypatch.setattr(threads.ModelThread, "__exit__", lambda self, *_: released.set())
    with pytest.raises(Undecided, match="may be deadlocked"):
        serve(threads=True)


# -- the script


def test_a_stamp_depends_on_all_tokens_in_front_of_it() -> None:
    one, other = chain(GENESIS, [1, 2, 3, 4]), chain(GENESIS, [9, 2, 3, 4])
    assert not set(one) & set(other)
    assert chain(one[1], [3, 4]) == one[2:]
    assert chain(GENESIS, [2**63 - 1] * 50)[-1] < 2**61


def test_samples_of_a_prompt_differ_and_each_group_counts() -> None:
    scripts = Scripts(groups=2)
    scripts.add(4, GenerationRequest("r4", [5, 6, 7], 9, samples=2))
    one, two = scripts["r4"], scripts["r4#1"]
    assert (one.index, one.prompt, len(one.tokens), len(one.stamps)) == (4, 3, 9, 12)
    assert one.stamps[:3] == two.stamps[:3] == chain(GENESIS, [5, 6, 7]) and one.tokens != two.tokens
    assert one.stamps == chain(GENESIS, [5, 6, 7, *one.tokens])
    assert one.tokens == [draw((stamp, stamp), 0) for stamp in one.stamps[2:-1]]
    assert draw((1, 2), 0) != draw((1, 3), 0)
    scripts.drop("r4")
    with pytest.raises(KeyError):
        scripts["r4#1"]


# -- how much memory


def alone(prompt: int, output: int) -> TraceRequest:
    return TraceRequest("r0", 0.0, prompt, output, (), "here:1")


def test_the_peak_demand_of_one_request_is_what_its_samples_hold_at_the_end() -> None:
    # Both samples of the first request store 9 + 3 tokens: the last one generated is never stored.
    assert demand_of(workload=[alone(9, 4)]) == 2 * 3
    assert demand_of(workload=[alone(9, 5)]) == 2 * 4
    window = demand_of([Group("local", 1, window=5)], [alone(90, 40)], chunk=8)
    assert window < demand_of(workload=[alone(90, 40)], chunk=8)


def test_the_peak_demand_grows_with_the_batch_and_never_with_the_memory() -> None:
    assert demand_of(batch=1) < demand_of(batch=6) < demand_of(batch=20)
    sizes = Geometry(pages=77, page_size=PAGE_SIZE, host_pages=5)
    assert peak_demand(WORKLOAD, sizes, chunk=CHUNK, batch=BATCH) == demand_of()


def test_no_pool_is_smaller_than_its_longest_request() -> None:
    sizes = Geometry(pages=1, page_size=PAGE_SIZE)
    longest = max(-(-(one.prompt_tokens + one.output_tokens) // PAGE_SIZE) for one in WORKLOAD)
    ways: dict[str, Any] = {"demand": demand_of(), "chunk": CHUNK}
    assert pool_pages(WORKLOAD, sizes, fraction=0.001, **ways) == longest
    assert pool_pages(WORKLOAD, sizes, fraction=1.0, **ways) == demand_of()
    assert pool_pages(WORKLOAD, sizes, fraction=0.5, **ways) == -(-demand_of() // 2)
