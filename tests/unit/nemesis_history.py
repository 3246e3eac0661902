"""Histories of elastic training that are made up: what ranks write that go through a schedule as they should."""

from __future__ import annotations

from typing import Any

import numpy as np

from scripts.benchmarks.support.nemesis import COLUMNS, EAGER, HOROVOD, SLOTS, Schedule

Records = dict[str, list[dict[str, Any]]]
DEATH, ALONE, BATCHES = 10, 4, 40
"""The batch in which a rank dies, batches until another joins, and all of them."""


def history_of(schedule: Schedule, weights: int = SLOTS * COLUMNS) -> Records:
    """Three hosts; if the schedule has a kill, the last dies before its gradient is handed over, and a fourth joins.

    All weights are averaged after each step, a step takes 0.1 s, and Horovod 0.3 s to begin again.
    """
    kills = any(trouble.action == "kill" for trouble in schedule.troubles)
    eager, redone = schedule.kind in EAGER, 1 if schedule.kind == HOROVOD else 0
    state, there, found = np.zeros((SLOTS, COLUMNS)), ["a", "b", "c"], Records()
    produced = dict.fromkeys("abcd", 0)

    def write(host: str, what: str, at: float, **more: Any) -> None:
        found.setdefault(host, []).append({"what": what, "at": at, **more})

    def flat() -> list[float]:
        return [float(one) for one in state.reshape(-1)] if weights == state.size else []

    def generation(at: float, batch: int) -> None:
        for host in there:
            write(host, "generation", at, size=len(there), rank=there.index(host), batch=batch, weights=flat())

    for host in there:
        write(host, "begin", 0.0, slot="abcd".index(host))
    generation(0.5, 0)
    for batch in range(BATCHES):
        now = 1 + 0.1 * batch
        if kills and batch == DEATH:
            write("c", "step", now, batch=batch)
            write("c", "trouble", now, action="kill", point="backward", batch=batch)
            there.remove("c")
            for host in there:
                write(host, "meeting", now + 0.02)
                write(host, "shutdown", now + 0.03, seconds=0.01)
                write(host, "init", now + 0.05, seconds=0.02)
            generation(now + 0.06, batch)
            for host in there:
                for again in range(batch - redone, batch):
                    write(host, "stepped", now + 0.07, batch=again, own=-1.0)
        if kills and batch == DEATH + ALONE:
            there.append("d")
            write("d", "begin", now, slot=3)
            generation(now, batch)
        for host in there:
            write(host, "step", now, batch=batch)
            write(host, "stepped", now + 0.08, batch=batch, own=-1.0)
            state["abcd".index(host), batch] -= 1 if eager else 1 / len(there)
            produced[host] += 1
    for host in there:
        stats = {"gradients_produced": produced[host], "staleness": {"0": 1, "1": 1}}
        write(host, "end", 10.0, drained=True, weights=flat(), stats=stats, max_staleness=1)
    return found
