"""The torch backend does what ops say, on real bytes; and whatever goes wrong, what others hold stays whole."""

import inspect
import threading
import tomllib
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from gpu_backend.backend import BackendClosed, NotEntered, cpu_backend
from gpu_backend.copier import PageOutOfRange
from gpu_backend.stamps import Undefined
from kvstate import LabelFork, Segment, Step
from kvstate.errors import Poisoned, SubmitError
from kvstate.ops import CopyIn, CopyOut, ForkCopy, StepBegin, StepEnd, Tier
from kvstate.ordering import NOTHING, Queue
from kvstate.refusals import CopyFailed
from kvstate.testing.drive import MeteredJudge, drive, peak_demand, pool_pages
from kvstate.testing.memory import MemoryBackend
from kvstate.testing.walk import Tally, walk
from kvstate.transitions.offload import Offloaded
from kvstate.transitions.reload import Reloaded
from kvstate.types import Geometry, Group
from kvstate.workload import synthetic

from .rig import DTYPES, Rig, layout

POISON = Undefined.POISON


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layers", [1, 3])
def test_forks_offload_and_reload_keep_every_byte_of_every_layer(dtype: str, layers: int) -> None:
    rig = Rig(layout(dtype=dtype, layers=layers))
    rig.ingest("a")
    rig.store("a", range(100, 106))
    rig.store("a", [106], post_forks=(LabelFork("main", "cfg"),))
    rig.store("a", [207], label="cfg")
    rig.store("a", [107, 108])
    device = rig.table("a") + rig.table("a", "cfg")
    claim = rig.manager.claim_offload("a")
    [copies] = claim.op.copies
    assert isinstance(rig.manager.commit_claim(claim), Offloaded)
    rig.backend.poison(Tier.DEVICE, 0, device)
    assert rig.backend.read(device, 4) == [POISON] * 4
    back = rig.manager.claim_reload("a")
    assert isinstance(rig.manager.commit_claim(back), Reloaded)
    rig.backend.poison(Tier.HOST, 0, [target for _, target, _ in copies])
    assert rig.content("a") == list(range(100, 109))
    assert rig.content("a", "cfg") == [*range(100, 107), 207]
    assert rig.judge.violations == []
    copier = rig.backend.copier
    assert copier.pages == [1, 4, 4], "a page that two labels share is copied once"
    assert copier.bytes == [pages * rig.layout.page_bytes for pages in copier.pages]


def test_padding_and_void_segments_write_to_the_sink_only() -> None:
    rig = Rig()
    rig.ingest("a")
    rig.backend.poison(Tier.DEVICE, 0, range(12))
    with rig.step(Segment("a", span=2), Segment.padding(6)) as plan:
        rig.backend.write(plan, 0, [1, 2])
        rig.backend.write(plan, 1, [7] * 6)
    assert rig.content("a") == [1, 2]
    held = [stamp for page in range(12) for stamp in rig.backend.read([page], 4)]
    assert held.count(POISON) == 46 and 7 not in held
    assert rig.backend.read([12], 4) == [7] * 4


def test_a_step_writes_where_its_plan_tensors_say() -> None:
    rig = Rig()
    rig.ingest("a")
    with rig.step(Segment("a", span=2)) as plan:
        tensors = rig.backend.bind(plan).tensors()
        tensors.token_slot[:] = torch.tensor([1, 0])
        rig.backend.write(plan, 0, [1, 2])
    assert rig.content("a") == [2, 1]


def test_one_stamp_per_computed_token_is_required() -> None:
    rig = Rig()
    rig.ingest("a")
    with rig.step(Segment("a", span=2)) as plan, pytest.raises(ValueError, match="computes 2 tokens, got 3 stamps"):
        rig.backend.write(plan, 0, [1, 2, 3])


def test_kv_is_reached_inside_a_launch_only() -> None:
    rig = Rig()
    rig.ingest("a")
    plan = rig.plan(Step((Segment("a"),)))
    with pytest.raises(NotEntered, match="not being launched"):
        rig.backend.bind(plan)
    with rig.manager.launch(plan):
        rig.backend.bind(plan)
    with pytest.raises(NotEntered):
        rig.backend.write(plan, 0, [1])


def test_several_tables_are_read_by_one_gather() -> None:
    rig = Rig()
    rig.ingest("a", "b")
    rig.store("a", range(7))
    rig.store("b", range(50, 53))
    tables = [rig.table("a"), [], rig.table("b"), rig.table("a")]
    assert rig.backend.read_many(tables, [7, 0, 3, 2]) == [[*range(7)], [], [50, 51, 52], [0, 1]]


def test_a_table_that_ends_early_is_never_read_short() -> None:
    with pytest.raises(IndexError, match="1 pages of 4 tokens do not hold token 4"):
        Rig().backend.read([0], 5)
    with pytest.raises(IndexError, match=r"cache 'kv' has groups 0 \(full\), not 1"):
        Rig().backend.read([0], 1, group=1)


def test_tokens_are_loaded_and_stored_anywhere_and_what_is_no_stamp_is_poison() -> None:
    backend = Rig().backend
    backend.store(0, [3, 5], 1, [11, 12, 13, "garbage", POISON, 16])
    assert backend.load(0, [3, 5], 2, 7) == [12, 13, POISON, POISON, 16]
    assert backend.load(0, [5], 2, 3) == [16]


# -- failures


def test_a_failed_submit_runs_nothing_and_its_place_completes_by_a_skip() -> None:
    rig = Rig()
    rig.ingest("a")
    rig.store("a", range(4))
    rig.backend.poison(Tier.HOST, 0, range(12))
    rig.backend.fail_next(CopyOut)
    rig.backend.fail_next(CopyIn)
    claim = rig.manager.claim_offload("a")
    assert "CopyOut was made to fail" in claim.failure
    assert rig.backend.completed()[Queue.COPY_OUT] == claim.op.number
    assert isinstance(rig.manager.commit_claim(claim), CopyFailed)
    rig.manager.abandon(claim)
    assert rig.backend.read_host(range(12), 48) == [POISON] * 48
    assert rig.content("a") == [0, 1, 2, 3]
    assert (rig.backend.fail_none(), rig.backend.fail_none()) == (1, 0)
    assert rig.judge.violations == []


@pytest.mark.parametrize("kind", [StepBegin, ForkCopy])
def test_a_launch_that_fails_on_entry_leaves_no_row_held(kind: Any) -> None:
    rig = Rig()
    rig.ingest("a")
    rig.store("a", range(3))
    rig.backend.fail_next(kind)
    step = Step((Segment("a", "cfg"),), pre_forks=(LabelFork("main", "cfg"),))
    with pytest.raises(SubmitError), rig.launched(step):
        pass
    assert all(row.readers == 0 for row in rig.backend.memory.tables._rows)
    with rig.step(*step.segments, pre_forks=step.pre_forks) as plan:
        rig.backend.write(plan, 0, [9])
    assert rig.content("a", "cfg") == [0, 1, 2, 9]


def test_an_error_of_the_device_is_fatal_and_says_what_it_was() -> None:
    backend = cpu_backend(Geometry(pages=4, host_pages=4))
    with pytest.raises(Poisoned, match=r"#1 CopyOut failed: PageOutOfRange: .*within 0 … 3") as caught:
        backend.submit(CopyOut(1, NOTHING, None, ([(4, 0, 1)],)))
    assert isinstance(caught.value.__cause__, PageOutOfRange), "the sink is no page to copy"
    with pytest.raises(Poisoned):
        backend.wait((0, 1, 0))


# -- closing


def test_a_launch_that_runs_while_the_backend_closes_may_still_end() -> None:
    rig = Rig()
    rig.ingest("a")
    plan = rig.plan(Step((Segment("a", span=2),)))
    launch = rig.manager.launch(plan)
    launch.__enter__()
    rig.backend.close()
    rig.backend.close()
    rig.backend.write(plan, 0, [1, 2])
    launch.__exit__(None, None, None)
    rig.backend.wait((plan.lease.number, 0, 0))
    with pytest.raises(BackendClosed, match="the cache 'kv' is closed"):
        rig.backend.read([0], 1)


def test_ops_after_the_close_do_nothing_and_complete() -> None:
    backend = cpu_backend(Geometry(pages=4))
    backend.close()
    backend.submit(StepBegin(1, NOTHING, None))
    backend.submit(CopyOut(2, NOTHING, None, ([(99, 99, 1)],)))
    assert backend.completed() == (1, 2, 0)


# -- threads, and everything together


def test_threads_write_disjoint_pages_at_once() -> None:
    rig = Rig(layout(pages=64))
    names = [f"r{k}" for k in range(4)]
    rig.ingest(*names)
    with rig.step(*(Segment(name, span=50) for name in names)) as plan:
        start = threading.Barrier(4)

        def write(place: int) -> None:
            start.wait(60)
            for turn in range(40):
                rig.backend.write(plan, place, [place * 1000 + turn] * 50)

        threads = [threading.Thread(target=write, args=(place,)) for place in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    for place, name in enumerate(names):
        assert rig.content(name) == [place * 1000 + 39] * 50


@pytest.mark.slow
@pytest.mark.parametrize("mode", [{}, {"asynchronous": True, "sampled": True}, {"threads": True}], ids=str)
@pytest.mark.parametrize(
    "groups", [(Group(),), (Group("full", 256), Group("local", 128, window=40))], ids=["one group", "two groups"]
)
def test_a_served_workload_generates_what_it_does_on_the_memory_device(
    mode: dict[str, bool], groups: tuple[Group, ...]
) -> None:
    workload = synthetic(16, seed=3, prompt_tokens=(20, 600), output_tokens=(30, 120), shared_prefix_share=0.5)
    geometry = Geometry(pages=1, page_size=16, groups=groups)
    demand = peak_demand(workload, geometry, chunk=128, batch=4)
    pages = pool_pages(workload, geometry, demand=demand, chunk=128, fraction=0.3)
    geometry = attrs.evolve(geometry, pages=pages, host_pages=demand)
    reports = []
    for make in (MemoryBackend, cpu_backend):
        judge = MeteredJudge.of(geometry)
        backend = make(geometry, judge=judge)
        report = drive(workload, geometry, backend, judge=judge, prefix_cache=True, chunk=128, batch=4, **mode)
        assert report.holds, report
        assert report.offloads > 0 and report.reloads > 0
        reports.append(report)
    assert reports[0].digest == reports[1].digest


@pytest.mark.slow
def test_random_programs_agree_with_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstate.testing.subject.find", lambda name: cpu_backend)
    assert walk(7, 60.0, Tally("walk"), programs_max=6, device="cpu") is None


def test_the_command_finds_the_device_by_its_name() -> None:
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["kvstate.backends"]["cpu"] == "gpu_backend.backend:cpu_backend"
    assert list(inspect.signature(cpu_backend).parameters) == ["geometry", "judge", "layers", "kv_heads", "head_dim"]
    backend = cpu_backend(Geometry(pages=5, page_size=8, name="mine"), layers=3, kv_heads=4, head_dim=16)
    assert backend.layout.page_shape == (3, 2, 8, 4, 16)
    assert (backend.geometry.pages, backend.geometry.name) == (5, "mine")


def test_a_step_end_needs_no_begin_that_ran() -> None:
    rig = Rig()
    rig.ingest("a")
    plan = rig.plan(Step((Segment("a"),)))
    rig.backend.submit(StepEnd(1, NOTHING, None, 99, plan))
    assert rig.backend.completed() == (1, 0, 0)
