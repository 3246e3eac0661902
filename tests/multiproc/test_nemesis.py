"""Elastic training with trouble, under ``horovodrun``: schedules in which something was wrong once, and others."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.multiproc
LEAKS = 50 if os.environ.get("HVD_ASYNC_TEST_LONG") else 12
"""Resets of the schedule that looks for leaks."""
MENDED = {
    0: "a step whose round had come when it was broken off was taken for one that user code had ended",
    5: "a new rank gave up when another died while it met the others for the first time",
    48: "who met a rank that died just then waited for it to connect, 150 s",
    52: "a gradient that was handed over after a loss was lost",
    126: "Horovod and Python each waited for the other's lock, once in two hundred times",
}
"""Seeds of schedules in which something was wrong once, and what. They are for a long run: where cores are shared, new
ranks may take longer to come than a schedule waits for them."""


@pytest.fixture(scope="module")
def histories() -> list[Any]:
    """Return the histories of all schedules, in their order: of two jobs, which begin with two ranks and with three."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        from benchmarks.support import launch
        from benchmarks.support.history import History
        from benchmarks.support.nemesis import COLUMNS, SLOTS, Schedule, Trouble, drawn

        moves = [("join", 3, 0), ("join", 20, 0), ("leave", 60, 0), ("leave", 60, 2)]
        grows = [Trouble(i, action, "between", batch, victim, 0.0) for i, (action, batch, victim) in enumerate(moves)]
        cuts = [Trouble(number, "cut", "between", 2 * number + 2, number, 0.0) for number in range(LEAKS)]
        jobs = {2: [Schedule(1000, "solo", tuple(grows), 2), Schedule(1001, "dpsgd", tuple(cuts), 2)]}
        if os.environ.get("HVD_ASYNC_TEST_LONG"):
            jobs[3] = [drawn(seed) for seed in MENDED]
        found = []
        for ranks, schedules in jobs.items():
            plan = {"framework": "torch", "weights": SLOTS * COLUMNS, "schedules": [one.content() for one in schedules]}
            blocks = launch.run("nemesis", ranks, plan, limit=240.0, elastic=True)
            found += [History(Schedule.of(block["schedule"]), block["history"]) for block in blocks]
        return found
    finally:
        sys.path.remove(str(ROOT / "scripts"))


def test_nothing_is_lost_counted_twice_or_hung(histories):
    assert len(histories) == 2 + len(MENDED) * bool(os.environ.get("HVD_ASYNC_TEST_LONG"))
    for history in histories:
        assert history.violations() == [], str(history.schedule)


def test_two_ranks_become_four_and_two_again(histories):
    sizes = histories[0].sizes()
    assert (sizes[0], max(sizes), sizes[-1]) == (2, 4, 2)


def test_resets_leave_no_thread_socket_or_file_behind(histories):
    for held in histories[1].held():
        assert len(held) == LEAKS + 1
        for number in range(2):  # threads, files; one that is about to end is none that stays
            early, late = (max(one[number] for one in held[1:4]), min(one[number] for one in held[-4:]))
            assert late <= early, held
