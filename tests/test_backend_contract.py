"""Every backend that is installed keeps the contract; and a backend that breaks it is caught."""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import pytest

from kvstate.errors import Poisoned
from kvstate.ops import CopyIn, CopyOut, ForkCopy, Op, Plan, StepBegin
from kvstate.ordering import NOTHING
from kvstate.testing import backends, contract
from kvstate.testing.contract import CONTRACT, GROUPS
from kvstate.testing.memory import MemoryBackend
from kvstate.types import Geometry

INSTALLED = sorted(point.name for point in entry_points(group=backends.GROUP))


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", INSTALLED)
def test_an_installed_backend_keeps_the_contract(name: str, check: Callable[[Any], None]) -> None:
    make = backends.find(name)
    check(make)
    assert check in CONTRACT and check.__doc__


@pytest.mark.parametrize("check", GROUPS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", INSTALLED)
def test_an_installed_backend_keeps_the_contract_of_several_groups(name: str, check: Callable[[Any], None]) -> None:
    make = backends.find(name)
    check(make)
    assert check in GROUPS and check.__doc__


@pytest.mark.parametrize("name", INSTALLED)
def test_a_lost_device_refuses_everything_and_wakes_who_waits_for_it(name: str) -> None:
    backend = backends.find(name)(Geometry(pages=4))
    errors: list[BaseException] = []
    waiting = threading.Event()

    def wait() -> None:
        waiting.set()
        try:
            backend.wait((9, 0, 0))
        except Poisoned as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert waiting.wait(60)
    backend.fail_next(fatal=True)
    for number in (1, 2):
        with pytest.raises(Poisoned, match="#1"):
            backend.submit(StepBegin(number, NOTHING, None))
    thread.join(60)
    assert len(errors) == 1


class WritesToTheNextSlot(MemoryBackend):
    def write(self, plan: Plan, place: int, stamps: Any) -> None:
        view = plan.in_step_order[place]
        self.store(0, (*view.tables[0], view.tables[0][-1]), view.start + 1, list(stamps)[:-1])


class WritesTheFirstGroupOnly(MemoryBackend):
    def write(self, plan: Plan, place: int, stamps: Any) -> None:
        view = plan.in_step_order[place]
        self.store(0, view.tables[0], view.start, stamps)


class WritesPaddingToPageNought(MemoryBackend):
    def write(self, plan: Plan, place: int, stamps: Any) -> None:
        view = plan.in_step_order[place]
        self.store(0, [0] * 9 if view.sink else view.tables[0], view.start, stamps)


class LosesTheLastToken(MemoryBackend):
    def _copy(self, op: Any) -> None:
        short = tuple([(source, target, tokens - 1) for source, target, tokens in copies] for copies in op.copies)
        super()._copy(type("Op", (), {"copies": short, "source_tier": op.source_tier, "target_tier": op.target_tier}))


class WritesPaddingOfOtherGroupsToPageNought(MemoryBackend):
    def write(self, plan: Plan, place: int, stamps: Any) -> None:
        view = plan.in_step_order[place]
        for group, table in enumerate(view.tables):
            self.store(group, [0] * 9 if view.sink and group else table, view.start, stamps)


class CopiesTheFirstGroupOnly(MemoryBackend):
    def _copy(self, op: Any) -> None:
        super()._copy(type("Op", (), {"copies": (op.copies[0], []), "source_tier": op.source_tier,
                                      "target_tier": op.target_tier}))  # fmt: skip


class KeepsGroupsApart(MemoryBackend):
    def _take(self, tier: Any, group: int, pages: Any) -> None:
        pass


class ReadsTheFirstGroupForAll(MemoryBackend):
    def load(self, group: int, *args: Any) -> list[Any]:
        return super().load(0, *args)


class PoisonsTheFirstGroupOnly(MemoryBackend):
    def poison(self, tier: Any, group: int, pages: Any) -> None:
        super().poison(tier, 0, pages)


class ForkCopiesNothing(MemoryBackend):
    def _copy(self, op: Any) -> None:
        if not isinstance(op, ForkCopy):
            super()._copy(op)


class RunsWhatFails(MemoryBackend):
    def skip(self, op: Op) -> None:
        super().skip(op)
        if isinstance(op, (CopyOut, CopyIn)):
            self.poison(op.source_tier, 0, [source for source, _, _ in op.copies[0]])


class PoisonsNothing(MemoryBackend):
    def poison(self, tier: Any, group: int, pages: Any) -> None:
        pass


class CompletesNothing(MemoryBackend):
    def completed(self) -> Any:
        return (0, 0, 0)


class ForgetsThatItWasLost(MemoryBackend):
    def submit(self, op: Op) -> None:
        try:
            super().submit(op)
        except Exception:
            if isinstance(op, CopyOut):
                return
            raise


@pytest.mark.parametrize(
    ("broken", "caught_by"),
    [
        (WritesToTheNextSlot, contract.what_a_step_writes_is_read_back),
        (WritesPaddingToPageNought, contract.a_step_writes_its_own_pages_only),
        (LosesTheLastToken, contract.offload_and_reload_keep_every_token),
        (ForkCopiesNothing, contract.forks_copy_the_partly_filled_page),
        (RunsWhatFails, contract.an_offload_that_fails_at_submit_changes_nothing),
        (RunsWhatFails, contract.a_reload_that_fails_at_submit_changes_nothing),
        (PoisonsNothing, contract.poisoned_pages_hold_nothing_to_rely_on),
        (CompletesNothing, contract.completion_is_polled_and_only_rises),
        (ForgetsThatItWasLost, contract.a_lost_device_refuses_everything),
        (WritesTheFirstGroupOnly, contract.every_group_reads_back_what_steps_write),
        (WritesPaddingOfOtherGroupsToPageNought, contract.a_step_over_groups_writes_its_own_pages_only),
        (ReadsTheFirstGroupForAll, contract.a_window_lets_pages_go_and_reads_on),
        (ReadsTheFirstGroupForAll, contract.a_sector_is_reused_by_another_group),
        (KeepsGroupsApart, contract.what_a_group_writes_is_written_over_what_others_had_in_the_same_bytes),
        (CopiesTheFirstGroupOnly, contract.offload_and_reload_move_what_each_group_holds),
        (CopiesTheFirstGroupOnly, contract.forks_copy_the_partly_filled_page_of_every_group),
        (PoisonsTheFirstGroupOnly, contract.poisoned_pages_of_any_group_hold_nothing_to_rely_on),
    ],
)
def test_a_backend_that_breaks_its_word_is_caught(
    broken: type[MemoryBackend], caught_by: Callable[[Any], None]
) -> None:
    with pytest.raises((AssertionError, IndexError)):
        caught_by(broken)
