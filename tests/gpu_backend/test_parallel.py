"""Tensor-parallel ranks that are given the same calls are in the same state after each of them; real processes.

Every rank has its own machine and its own bytes, over its share of the heads. Nothing but the calls is agreed, and
strings hash differently in every process. One set of processes runs every program of its world size.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest

with warnings.catch_warnings():
    # A torch without numpy says so when it is first imported.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    torch = pytest.importorskip("torch")

import torch.distributed as dist

from gpu_backend import TorchBackend
from gpu_backend.ranks import RanksDiverge, validate_ranks
from kvstate import KVManager, LabelFork, Refusal, Segment, Step
from kvstate.ops import Plan
from kvstate.prefix import page_keys
from kvstate.state import Lease, OffloadClaim
from kvstate.testing.alphabet import ADVANCE, ALPHABET, RandomChooser
from kvstate.testing.memory import nobodys
from kvstate.testing.world import Sizes, World
from kvstate.view import StateView

from .decoder import Model
from .model import Service, Share
from .processes import run_ranks

PAGE = 4
SIZES = Model(windows=(6, None, 6, None), kv_heads=4)
PAGES = 12
VERBS = 120
LETTERS = 150
DIVERGES_AT = 60


def alike(view: StateView) -> bool:
    """Tell, on every rank, whether the view is the same on all."""
    digest = torch.tensor(list(bytes.fromhex(view.digest())), dtype=torch.uint8)
    digests = [torch.empty_like(digest) for _ in range(dist.get_world_size())]
    dist.all_gather(digests, digest)
    return all(torch.equal(digest, other) for other in digests)


def look(kv: KVManager) -> None:
    """Check that all ranks are in the same state; the first field that differs is found where they are not."""
    if not alike(kv.view()):
        validate_ranks(kv)
        raise AssertionError("digests differ, and no field")


class Calls:
    """Calls on a manager as a seed says: what is called depends on the seed and on what the manager answered."""

    def __init__(self, share: Share, seed: int) -> None:
        layout = SIZES.layout(page_size=PAGE, pages=PAGES, host_pages=12, world_size=share.world)
        self.backend = TorchBackend(layout)
        self.kv = KVManager(layout.geometry(), self.backend, debug=True)
        self.draw = random.Random(seed)
        self.words: dict[str, list[int]] = {}
        self.log: list[str] = []
        self.verbs: list[Callable[[], Any]] = [
            *[self.step] * 6, self.ingest, self.start, self.ahead, self.fork, self.offload, self.reload, self.reload,
            self.reset, self.remove, self.key, self.key, self.abandon,
        ]  # fmt: skip

    def call(self) -> None:
        verb = self.draw.choice(self.verbs) if len(self.words) > 2 else self.start
        answer = verb()
        self.log.append(f"{verb.__name__}: {type(answer).__name__}")
        for tier, group, pages in nobodys(self.kv.view()):
            self.backend.poison(tier, group, pages)

    def some(self) -> str:
        return self.draw.choice(list(self.words))

    def stored(self, name: str) -> int:
        return next(
            stream.length for stream in self.kv.view().streams if (stream.request, stream.label) == (name, "main")
        )

    # -- verbs

    def ingest(self) -> Any:
        name = f"r{len(self.log)}"
        self.words[name] = []
        return self.kv.ingest(name)

    def run(self, step: Step, accepted: Sequence[int] | None = None) -> Any:
        lease = self.kv.admit(step)
        return lease if isinstance(lease, Refusal) else self.finish(lease, accepted)

    def finish(self, lease: Lease, accepted: Sequence[int] | None = None) -> Any:
        plan = self.kv.plan(lease)
        if isinstance(plan, Refusal):
            plan = self.kv.plan(lease)
        assert isinstance(plan, Plan)
        with self.kv.launch(plan):
            for place, view in enumerate(plan.in_step_order):
                self.backend.write(plan, place, range(view.start, view.length))
        done = self.kv.commit(lease, accepted)
        for place, segment in enumerate(lease.step.segments):
            if segment.request is not None and segment.label == "main" and not lease.rows[place].void:
                own = self.words[segment.request]
                own.extend(self.draw.randrange(3) for _ in range(self.stored(segment.request) - len(own)))
        return done

    def step(self) -> Any:
        names = self.draw.sample(list(self.words), self.draw.randint(1, 2))
        rows = [Segment(name, span=self.draw.choice((1, 1, 4, 9))) for name in names]
        return self.run(Step(rows), [self.draw.randint(1, row.span) for row in rows])

    def start(self) -> Any:
        """Begin on what others have computed."""
        self.ingest()
        name = list(self.words)[-1]
        prompt = [self.draw.randrange(2) for _ in range(9)]
        keys = page_keys(prompt, PAGE)
        prefix = keys[: self.kv.match(keys)]
        done = self.run(Step([Segment(name, span=9 - len(prefix) * PAGE, prefix=prefix)]))
        if not isinstance(done, Refusal):
            self.words[name] = prompt
        return done

    def ahead(self) -> Any:
        """Admit a step while another one is open; give one of them up."""
        name = self.some()
        first = self.kv.admit(Step([Segment(name, span=5)]))
        second = self.kv.admit(Step([Segment(name), Segment.padding(3)]))
        if isinstance(first, Refusal):
            return first if isinstance(second, Refusal) else self.kv.abort(second)
        if not isinstance(second, Refusal):
            self.kv.abort(second)
        return self.finish(first, [self.draw.randint(1, 5)])

    def fork(self) -> Any:
        name = self.some()
        forks = [LabelFork("main", "beam")]
        return self.run(
            Step([Segment(name, span=2)], **self.draw.choice(({"pre_forks": forks}, {"post_forks": forks})))
        )

    def offload(self) -> Any:
        return self.kv.offload(self.some(), discard_in_flight=True)

    def reload(self) -> Any:
        away = [name for name in self.words if self.kv.is_offloaded(name)]
        return self.kv.reload(self.draw.choice(away) if away else self.some())

    def abandon(self) -> Any:
        claim = self.kv.claim_offload(self.some())
        return self.kv.abandon(claim) if isinstance(claim, OffloadClaim) else claim

    def reset(self) -> Any:
        name = self.some()
        self.words[name] = []
        return self.kv.reset(name, free=self.draw.random() < 0.5)

    def remove(self) -> Any:
        name = self.some()
        del self.words[name]
        return self.kv.remove(name)

    def key(self) -> Any:
        name = self.some()
        stream = next((own for own in self.kv.view().streams if own.request == name), None)
        return self.kv.key(name, self.words[name][stream.keyed * PAGE :] if stream is not None else [])


# -- programs: what one rank does


def calls(share: Share) -> dict[str, Any]:
    made = Calls(share, seed=6)
    for _ in range(VERBS):
        made.call()
        look(made.kv)
    return {"log": made.log, "bytes": made.backend.copier.bytes}


def letters(share: Share) -> dict[str, Any]:
    """The calls of the walk: two machines with one group each that retrieve from each other."""
    choose = RandomChooser(random.Random(3))
    world = World(Sizes(pages=8, host_pages=6, page_size=2))
    for _ in range(LETTERS):
        node = world.b if choose.below(5) < 2 else world.a
        ready = [letter for letter in (*ALPHABET, ADVANCE) if letter.ready(node)]
        at = choose.below(sum(letter.weight for letter in ready))
        for letter in ready:
            at -= letter.weight
            if at < 0:
                letter.call(node, choose)
                break
        for subject in (world.a.subject, world.b.subject):
            assert alike(subject.snapshot())
    return {"seen": len(world.program)}


def served(share: Share, *, asynchronous: bool) -> dict[str, Any]:
    """The scheduler, with requests that come and are cancelled; a rank has its heads, and all have the same tokens."""
    service = Service(
        SIZES, 1, share, pages=10, host_pages=6, requests=12, asynchronous=asynchronous, prefix_cache=True
    )
    outputs = list(service.run(look))
    # What the whole history gives on one rank: one of them reckons that for all, which have the same outputs.
    assert share.rank or all(map(service.right, outputs))
    assert not service.judge.violations
    return {
        "outputs": [(output.request, output.sample, output.tokens, output.finish.name) for output in outputs],
        "copied": service.backend.copier.pages,
    }


def diverged(share: Share, what: str) -> dict[str, Any]:
    """The last rank does something else once; every rank learns of it after that call, and what it was."""
    made = Calls(share, seed=9)
    odd = share.rank == share.world - 1
    for turn in range(VERBS):
        made.call()
        if turn == DIVERGES_AT and odd:
            ODD[what](made.kv)
        try:
            look(made.kv)
        except RanksDiverge as error:
            return {"turn": turn, "field": error.field, "values": list(error.values.items())}
    return {"turn": VERBS}


def _stored(kv: KVManager) -> str:
    return next(
        stream.request
        for stream in kv.view().streams
        if stream.residency == "OnDevice" and stream.length and not stream.rows
    )


def given_up(kv: KVManager) -> None:
    """Launch a step of somebody who needs no page for it, and abort it."""
    leases = (kv.admit(Step([Segment(stream.request)])) for stream in kv.view().streams if stream.length % PAGE)
    lease = next(lease for lease in leases if isinstance(lease, Lease))
    plan = kv.plan(lease)
    assert isinstance(plan, Plan)
    with kv.launch(plan):
        pass
    kv.abort(lease)


ODD: dict[str, Callable[[KVManager], Any]] = {
    "a request more": lambda kv: kv.ingest("nobody else has this"),
    "a reset": lambda kv: kv.reset(_stored(kv)),
    "a step that was given up": given_up,
    "other weights": lambda kv: kv.reset_prefix_cache(),
}


def run_programs(rank: int, world: int) -> dict[str, Any]:
    share = Share(rank, world)
    return {
        "hash": hash("kvstate"),
        "calls": calls(share),
        "letters": letters(share),
        "served": served(share, asynchronous=False),
        "a step ahead": served(share, asynchronous=True),
        **{f"diverged by {what}": diverged(share, what) for what in ODD},
    }


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(run_programs, request.param, tmp_path_factory.mktemp(f"parallel{request.param}"))


def equal(ranks: list[dict[str, Any]], program: str) -> Any:
    """What every rank returned, which is the same."""
    first, *others = (rank[program] for rank in ranks)
    assert all(other == first for other in others)
    return first


@pytest.mark.slow
def test_ranks_agree_after_every_call_on_groups_windows_and_cached_pages(ranks: list[dict[str, Any]]) -> None:
    told = equal(ranks, "calls")
    seen = set(told["log"])
    assert {"step: PagesExhausted", "offload: Offloaded", "reload: Reloaded", "key: Keyed", "ahead: Committed"} <= seen
    assert all(told["bytes"]), "forks, offloads and reloads moved bytes"
    assert len({rank["hash"] for rank in ranks}) == len(ranks), "ranks that hash alike show nothing of iteration order"


@pytest.mark.slow
def test_ranks_agree_after_every_letter_of_the_walk(ranks: list[dict[str, Any]]) -> None:
    assert equal(ranks, "letters")["seen"] > LETTERS / 2


@pytest.mark.slow
@pytest.mark.parametrize("program", ["served", "a step ahead"])
def test_ranks_that_share_the_heads_schedule_and_generate_alike_whatever_is_cancelled(
    ranks: list[dict[str, Any]], program: str
) -> None:
    told = equal(ranks, program)
    finishes = [finish for _, _, _, finish in told["outputs"]]
    assert finishes.count("LENGTH") > 5 and finishes.count("CANCELLED") > 0
    assert told["copied"][1] > 0, "somebody was evicted"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "field"),
    [
        ("a request more", "requests["),
        ("a reset", "pages_free.device["),
        ("a step that was given up", "streams["),
        ("other weights", "streams["),
    ],
)
def test_a_rank_that_did_something_else_is_found_after_that_call_and_named_by_what_differs(
    ranks: list[dict[str, Any]], what: str, field: str
) -> None:
    told = equal(ranks, f"diverged by {what}")
    assert told["turn"] == DIVERGES_AT
    assert told["field"].startswith(field)
    *others, odd = (value for _, value in told["values"])
    assert len(set(others)) == 1 and odd not in others
