"""CPU time, wake-ups and fresh pages that this process's threads have used, by kind of thread."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path

KINDS = {
    "MainThread": "training",
    "hvd_async-engine": "engine",
    "hvd_async-coordinator": "coordinator",
    "hvd_async-horovod-op": "collectives' callers",
    "ZMQbg": "ZeroMQ",
}
"""Kinds of threads, by the beginning of their names."""
OTHERS = "Horovod, framework"
PAGES = "fresh pages"
PARAMETERS = 16
"""Weights of a model, of one size."""
Usage = dict[str, tuple[float, float]]
"""(CPU in ms, wake-ups) by what threads are for; under ``PAGES`` (page faults, 0) of the process."""


def usage() -> Usage:
    """Return the sums until now, of threads that live."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found: Usage = {PAGES: (float(resource.getrusage(resource.RUSAGE_SELF).ru_minflt), 0.0)}
    for task in Path("/proc/self/task").iterdir():
        name = names.get(int(task.name)) or (task / "comm").read_text().strip()
        kind = next((kind for beginning, kind in KINDS.items() if name.startswith(beginning)), OTHERS)
        nanoseconds = int((task / "schedstat").read_text().split()[0])
        status = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
        cpu, wakeups = found.get(kind, (0.0, 0.0))
        found[kind] = cpu + nanoseconds / 1e6, wakeups + int(status["voluntary_ctxt_switches"])
    return found


def used_by(step: Callable[[], None], steps: int) -> dict[str, list[float]]:
    """Take so many steps; return what one has used, by kind, and under "step" (its ms, 0)."""
    before, started = usage(), time.perf_counter()
    for _ in range(steps):
        step()
    elapsed, after = time.perf_counter() - started, usage()
    nothing = (0.0, 0.0)
    found = {
        kind: [(now - then) / steps for now, then in zip(after[kind], before.get(kind, nothing), strict=True)]
        for kind in after
    }
    return found | {"step": [1e3 * elapsed / steps, 0.0]}


def copy_ms(copy: Callable[[], object], repetitions: int = 20) -> float:
    """Return what a copy of the weights costs the calling thread, in ms."""
    copy()
    started = time.thread_time()
    for _ in range(repetitions):
        copy()
    return 1e3 * (time.thread_time() - started) / repetitions
