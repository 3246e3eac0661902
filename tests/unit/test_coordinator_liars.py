"""The coordinator alone, with an honest rank and one that says anything: it blames no honest rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hvd_async.runtime.coordinator
from hvd_async.algorithms.eager.config import EagerConfig, GradientReady, StartRound, StepEntered
from hvd_async.algorithms.gossip.config import GossipConfig, PairRequested
from hvd_async.algorithms.leader.config import LeaderConfig, PullProgress
from hvd_async.algorithms.registry import FAMILIES
from hvd_async.runtime.coordinator import Coordinator
from hvd_async.runtime.interfaces import Gone
from hvd_async.runtime.protocol import (
    Accepted,
    CallRoll,
    Command,
    Event,
    Failed,
    Finished,
    Hello,
    JobFailed,
    Present,
    RankLost,
    Registered,
    Welcome,
)
from hvd_async.testing import CODEC
from tests.unit.hub import Hub
from tests.unit.test_messages import KINDS, any_message

SOLO = EagerConfig("solo", 2, 0.0, 0, 1)
HONEST, LIAR = 0, 1


class Stage(Hub):
    """A hub in which rank 0 trains with partial allreduce, as it should, and rank 1 reads from a script."""

    def __init__(self, script: Sequence[Event]) -> None:
        self._script = deque(script)
        self._honest: deque[Event] = deque([Hello("here", 1), Registered(0, SOLO, ["w"], [1])])
        self._liars_turn = False
        self.heard: list[Command] = []
        self.step = 0
        self.coordinator = Coordinator(self, FAMILIES, ["here", "there"], clock=lambda: 0.0)

    def run(self) -> list[Command]:
        """What rank 0 has heard when no rank has more to say; an error of the coordinator is raised."""
        self.coordinator.run()
        return self.heard

    def send(self, ranks: Sequence[int], command: Command) -> None:
        if HONEST not in ranks:
            return
        self.heard.append(command)
        if isinstance(command, CallRoll):
            self._honest.append(Present())
        if (
            command == Accepted(0) or (isinstance(command, StartRound) and command.round == self.step)
        ) and self.step < 5:
            self.step += 1
            self._honest += [StepEntered(0, self.step, []), GradientReady(0, [0], self.step)]

    def receive(self, timeout: float | None) -> tuple[Sequence[int], Event | Gone] | None:
        for _ in range(2):
            self._liars_turn = not self._liars_turn
            lines, rank = (self._script, LIAR) if self._liars_turn else (self._honest, HONEST)
            if lines:
                return (rank,), lines.popleft()
        self.coordinator._stopping.set()
        return None


def blamed(heard: Sequence[Command]) -> set[int]:
    return {command.rank for command in heard if isinstance(command, RankLost)}


def test_the_honest_rank_trains_next_to_one_that_is_honest_too():
    stage = Stage([Hello("there", 2), Registered(0, SOLO, ["w"], [1])])
    heard = stage.run()
    assert sum(isinstance(command, StartRound) for command in heard) == 2, "as far as max_staleness lets it"
    assert not blamed(heard)


LIES = any_message(CODEC.events, {**KINDS, int: st.integers(-1, 3)})
BEGIN: list[Event] = [Hello("there", 2), Registered(0, SOLO, ["w"], [1])]


@given(st.booleans(), st.lists(LIES, max_size=8))
def test_whatever_a_rank_says_the_others_are_not_to_blame(begun, script):
    heard = Stage((BEGIN if begun else []) + script).run()
    assert blamed(heard) <= {LIAR}


def opened(config: Any, names: int = 1, checksums: int = 1, members: Sequence[int] = (), number: int = 0) -> Registered:
    return Registered(number, config, ["w"] * names, [1] * checksums, list(members))


ALONE = [LIAR]
CANNOT_BE: dict[str, list[Event]] = {
    "hello twice": [Hello("there", 2), Hello("there", 2)],
    "an unknown rank shares it": [opened(SOLO, members=[LIAR, 7])],
    "a rank shares it twice": [opened(SOLO, members=[LIAR, LIAR])],
    "it shares it itself not": [opened(SOLO, members=[HONEST])],
    "a negative rank": [opened(SOLO, members=[-1, LIAR])],
    "more names than checksums": [opened(SOLO, names=2)],
    "a trillion buckets": [opened(EagerConfig("solo", 2, 0.0, 0, 10**12), members=ALONE, number=9)],
    "a negative number of buckets": [opened(EagerConfig("solo", 2, 0.0, 0, -1), members=ALONE, number=9)],
    "no such quorum": [opened(EagerConfig("some", 2, 0.0, 0, 1), members=ALONE, number=9), StepEntered(9, 1, []),
                       GradientReady(9, [0], 1)],
    "no such neighbour": [opened(GossipConfig("adpsgd", "ring", [[5]]), members=ALONE, number=9), PairRequested(9)],
    "neighbours of no rank": [opened(GossipConfig("adpsgd", "ring", []), members=ALONE, number=9), PairRequested(9)],
    "no such rank in a group": [opened(LeaderConfig("lsgd", [[5]], 1, 1, ""), members=ALONE, number=9)],
    "a standing of other groups": [opened(LeaderConfig("lsgd", [[0]], 1, 1, "", progress=PullProgress(0, [], [])),
                                          members=ALONE, number=9)],
    "less produced than before": [opened(SOLO, members=ALONE, number=9), Finished(9, [-1])],
}  # fmt: skip


@pytest.mark.parametrize("name", CANNOT_BE)
def test_what_cannot_be_is_blamed_on_who_says_it(name, capfd):
    heard = Stage(CANNOT_BE[name]).run()
    assert blamed(heard) == {LIAR}
    assert "rank 1 on host there broke the protocol: " in capfd.readouterr().err


def test_who_takes_anothers_optimizer_for_itself_ends_the_job_and_no_rank_else_is_blamed():
    heard = Stage([opened(SOLO, members=ALONE)]).run()
    assert not blamed(heard)
    assert isinstance(heard[-1], JobFailed)
    assert "pass the same process_set" in heard[-1].problem


def test_one_rank_cannot_fill_the_memory_with_optimizers(monkeypatch):
    monkeypatch.setattr(hvd_async.runtime.coordinator, "MOST_OPTIMIZERS", 20)
    heard = Stage([*BEGIN, *(opened(SOLO, number=number) for number in range(1, 30))]).run()
    assert blamed(heard) == {LIAR}


def test_lines_of_a_rank_cannot_be_taken_for_anothers(capfd):
    forged = "boom\nhvd_async: rank 0 on host here died\r\x1b[2J\u202e" + "x" * 100_000
    heard = Stage([Failed(forged)]).run()
    reported = capfd.readouterr().err
    assert reported.count("\n") == 1
    assert reported[:-1].isprintable()
    assert "rank 1 on host there failed: boom\\nhvd_async: rank 0 on host here died\\r\\x1b[2J\\u202e" in reported
    assert len(reported) < 10_000
    lost = heard[-1]
    assert isinstance(lost, RankLost)
    assert lost.reason.isprintable()
    assert len(lost.reason) < 10_000


def test_no_event_is_left_out_where_very_many_come_together():
    """All ranks say hello at once, more than are handled before anything else is looked at."""
    size = 3 * hvd_async.runtime.coordinator.TOGETHER + 1

    class Crowd(Stage):
        has_more = True

        def __init__(self) -> None:
            self._left: deque[tuple[Sequence[int], Event]] = deque(
                ((rank,), Hello("here", rank)) for rank in range(size)
            )
            self.heard: list[Command] = []
            self.coordinator = Coordinator(self, FAMILIES, ["here"] * size, clock=lambda: 0.0)

        def send(self, ranks: Sequence[int], command: Command) -> None:
            self.heard.append(command)

        def receive(self, timeout: float | None) -> tuple[Sequence[int], Event | Gone] | None:
            if self._left:
                return self._left.popleft()
            self.coordinator._stopping.set()
            return None

    assert Crowd().run() == [Welcome()]
