"""The coordinator alone, in virtual time: when it names the ranks that others wait for."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

import hvd_async.runtime.coordinator
from hvd_async.algorithms.eager.config import EagerConfig, GradientReady, StepEntered
from hvd_async.algorithms.registry import FAMILIES
from hvd_async.runtime.coordinator import Coordinator
from hvd_async.runtime.interfaces import Gone
from hvd_async.runtime.protocol import CollectiveReady, Event, Finished, Hello, Registered
from tests.unit.hub import Hub

RANKS, SECONDS = 3, 190
CONFIG = EagerConfig("solo", 1000, 0.0, 0, 1)


class Stage(Hub):
    """A hub whose ranks 1 and 2 step in turn once a second, and whose rank 0 makes one call first.

    Args:
        call: the event of rank 0.
        steps: whether the others step.
    """

    def __init__(self, call: Event, steps: bool) -> None:
        begun: list[tuple[int, Event]] = [(rank, Hello("here", rank)) for rank in range(RANKS)]
        begun += [(rank, Registered(0, CONFIG, ["w"], [1])) for rank in range(RANKS)]
        self._events, self._steps = [*begun, (0, call)], steps
        self.now = 0.0
        self.coordinator = Coordinator(self, FAMILIES, ["here"] * RANKS, clock=lambda: self.now)

    def receive(self, timeout: float | None) -> tuple[Sequence[int], Event | Gone] | None:
        if self._events:
            rank, event = self._events.pop(0)
            return (rank,), event
        self.now += 1
        if self.now > SECONDS:
            self.coordinator.stop()
        if self._steps:
            rank, step = 1 + int(self.now) % 2, (1 + int(self.now)) // 2
            self._events = [(rank, StepEntered(0, step, [])), (rank, GradientReady(0, [0], step))]
        return None


DRAIN = Finished(0, [0])
CASES: dict[str, tuple[Event, bool, str]] = {
    "a drain, and the others step": (DRAIN, True, "drain"),
    "a drain, and nothing else": (DRAIN, False, "drain"),
    "a collective": (CollectiveReady(0, 1, "sum", "consensus_distance()", 1, "float64"), True, "consensus_distance()"),
}


@pytest.mark.parametrize(("call", "steps", "name"), CASES.values(), ids=CASES)
def test_a_call_that_only_some_ranks_have_made_is_named_early_even_if_the_others_step(call, steps, name, monkeypatch):
    stage, said = Stage(call, steps), list[tuple[float, str]]()
    monkeypatch.setattr(hvd_async.runtime.coordinator, "warn", lambda text: said.append((stage.now, text)))
    monkeypatch.setattr(stage.coordinator, "stop", stage.coordinator._stopping.set)
    stage.coordinator.run()
    about = [(now, text) for now, text in said if text.startswith(f"{name} of optimizer 0, in which rank 0 wait(s),")]
    assert [now for now, _ in about] == [18, 78, 138], "after 15 s, then each minute"
    assert all(
        re.search(r"has waited \d+ s more for rank\(s\) 1 \(here\), 2 \(here\): alive", text) for _, text in about
    )
