"""Optimizers that wait for ranks that are done with others: counted as events come, it is what comparing sets says."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from hvd_async.algorithms.eager.config import EagerConfig
from hvd_async.algorithms.eager.machine import EagerStateMachine
from hvd_async.runtime.machine import Siblings, StateMachine
from hvd_async.runtime.protocol import Finished, OptimizerDeleted, OptimizerEvent, Registered
from tests.conftest import examples

CONFIG = EagerConfig("solo", 2, 0.0, 0, 1)
RANKS = range(4)


def asked_by_sets(machines: dict[int, StateMachine[Any]]) -> set[tuple[int, int]]:
    """(Optimizer, rank): who is to open what, by the sets as they are."""
    return {
        (number, rank)
        for number, machine in machines.items()
        for sibling in machines.values()
        if sibling.computing and sibling.computing <= machine.opening
        for rank in sibling.draining
        if machine.awaits_registration_of(rank)
    }


def to_open_by_sets(machines: dict[int, StateMachine[Any]], drained: int) -> set[int]:
    """What a rank has to open before it is done with one."""
    waits_in = machines[drained].draining
    return {
        number
        for number, machine in machines.items()
        if number != drained and (machine.only_drains or (machine.opening and machine.opening <= waits_in))
    }


class Job:
    """Ranks that open, drain and delete three optimizers in any order."""

    def __init__(self) -> None:
        self.machines: dict[int, StateMachine[Any]] = {}
        self.siblings = Siblings()
        self.asked: set[tuple[int, int]] = set()
        self.kinds: Counter[str] = Counter()

    def can(self, kind: str, number: int, rank: int) -> bool:
        """Whether an event is allowed."""
        machine = self.machines.get(number)
        opened = machine is not None and rank in machine._opened
        if kind == "open":
            return not opened
        assert machine is None or isinstance(machine, StateMachine)
        return (
            machine is not None
            and opened
            and (rank in machine.computing or kind == "delete")
            and rank in machine.present
        )

    def act(self, kind: str, number: int, rank: int) -> None:
        """Handle it, and compare."""
        if not self.can(kind, number, rank):
            return
        machine = self.machines.setdefault(number, EagerStateMachine(number, RANKS))
        event: OptimizerEvent = Registered(number, CONFIG, ["w"], [1])
        if kind == "drain":
            event = Finished(number, [0])
            assert {m._optimizer for m in self.siblings.to_open(number)} == to_open_by_sets(self.machines, number)
        elif kind == "delete":
            event = OptimizerDeleted(number, [0])
        self.siblings.before(machine, rank)
        machine.handle(rank, event, 0.0)
        found = self.siblings.after(number, machine, rank)
        new = {(other._optimizer, who) for other, who in found if other.ask_to_register(who)}
        self.asked |= new
        if machine.over:
            del self.machines[number]
            self.asked = {(asked, who) for asked, who in self.asked if asked != number}
        expected = asked_by_sets(self.machines)
        assert new <= expected <= self.asked
        waiting = next((n for n, m in self.machines.items() if m.awaits_registration_of(rank)), None)
        assert (self.siblings.awaiting(rank) is None) == (waiting is None)
        self.kinds[kind] += 1


def test_counts_say_what_sets_would() -> None:
    """Jobs of moves that are drawn: all ranks have opened the first optimizer, and not yet all of them the others."""
    kinds: Counter[str] = Counter()
    asked = 0
    for seed in range(examples(600)):
        draw, job = random.Random(seed), Job()
        for rank in RANKS:
            job.act("open", 0, rank)
        for _ in range(40):
            kind = draw.choices(["open", "drain", "delete"], [4, 8, draw.choice([0, 1])])[0]
            able = [(n, rank) for n in range(3) for rank in RANKS if job.can(kind, n, rank)]
            if able:
                job.act(kind, *draw.choice(able))
        kinds += job.kinds
        asked += len(job.asked)
    assert min(kinds["open"], kinds["drain"], kinds["delete"], asked) > 200, "the draw has lost its teeth"


def test_ranks_in_a_drain_open_what_the_others_wait_in() -> None:
    """Ranks 2 and 3 are in a drain of 0, for which 0 and 1 are awaited, who wait in 1: and each rank is asked once."""
    job = Job()
    for rank in RANKS:
        job.act("open", 0, rank)
    for rank in (2, 3):
        job.act("drain", 0, rank)
    job.act("open", 1, 0)
    assert job.asked == set()
    job.act("open", 1, 1)
    assert job.asked == {(1, 2), (1, 3)}
    for rank in (2, 3):
        job.act("open", 1, rank)
    assert job.siblings.awaiting(2) is None
