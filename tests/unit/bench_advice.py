"""A rank of ``advice`` without a job: what it brings home, its trace, where one is asked for, and how long it took."""

from __future__ import annotations

from typing import Any

from hvd_async.simulation.names import waits_for_nobody
from hvd_async.traces.recorder import Recorder


def advised(block: dict[str, Any], rank: int, size: int, well: bool) -> dict[str, Any]:
    """Steps by a schedule, of a job that is recorded where that is asked for: all wait for the slowest, or nobody."""
    times, alone = block["times"], waits_for_nobody(block["arm"])
    if "trace" in block:
        clock = [0.0]
        recorder = Recorder(
            block["trace"], rank, size, algorithm="eager", options={"quorum": "all"}, clock=lambda: clock[0]
        )
        for step in times:
            for mark, seconds in (("arrived", step[rank]), ("released", max(step) - step[rank] + 0.002), ("done", 0.0)):
                clock[0] += seconds
                getattr(recorder, mark)()
        recorder.close()
    elapsed = sum(step[rank] if alone else max(step) for step in times) * (1.0 if well else 2.0)
    return {"elapsed": elapsed, "waited": 0.0, "stats": {}, "rounds_before": 0, "identical": True}
