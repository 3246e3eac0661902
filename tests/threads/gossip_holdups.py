"""Ranks as threads that are held up, and exchanges that come late, for tests of which rank waits for which."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from hvd_async.algorithms.gossip.message_format import HEADER
from hvd_async.algorithms.gossip.rank import PushSumWorker
from hvd_async.testing import Cluster, MemoryCollectives

GATE_TIMEOUT = 30.0


def pass_gate(gate: threading.Event | threading.Semaphore) -> None:
    passed = gate.wait(GATE_TIMEOUT) if isinstance(gate, threading.Event) else gate.acquire(timeout=GATE_TIMEOUT)
    assert passed, "what it waits for has not come"


def at(slow: int, step: int, act: Callable[[PushSumWorker], None]) -> Callable[[int, int, PushSumWorker], None]:
    """``before_step`` of a job: this rank does this before it takes this step."""

    def before_step(place: int, number: int, worker: PushSumWorker) -> None:
        if (place, number) == (slow, step):
            act(worker)

    return before_step


class Watch:
    """Knows which training threads wait inside their workers, and lets others wait until they do."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside: dict[int, PushSumWorker] = {}

    def tweak(self, worker: PushSumWorker) -> None:
        """Watch a rank."""
        waits = worker.engine.wait

        def watched(ready: Callable[[], bool], *reported: Any) -> None:
            with self._changed:
                self._inside[worker._place] = worker
                self._changed.notify_all()
            try:
                waits(ready, *reported)
            finally:
                with self._changed:
                    del self._inside[worker._place]

        worker.engine.wait = watched  # type: ignore[method-assign]

    def until(self, expected: dict[int, Any], what: Callable[[PushSumWorker], Any]) -> None:
        """Wait until the ranks at these places wait, and ``what`` of their workers is this."""

        def now() -> dict[int, Any]:
            return {place: what(worker) for place, worker in sorted(self._inside.items()) if place in expected}

        deadline = time.monotonic() + GATE_TIMEOUT
        with self._changed:
            while now() != expected:
                assert time.monotonic() < deadline, f"they wait with {now()}, not with {expected}"
                self._changed.wait(0.01)  # (what they wait for may change while they wait)


def holding(size: int, lands: Callable[[Any, list[int]], bool], at_ends: bool = False) -> Cluster:
    """A cluster of one optimizer, on whose ranks an exchange comes back when ``lands(worker, its messages' keys)``, or
    when the rank is done (not with ``at_ends``)."""

    def wrap(collectives: MemoryCollectives) -> MemoryCollectives:
        exchange = collectives.alltoall

        def alltoall(*args: Any) -> Any:
            handle = exchange(*args)
            done = handle.done

            def is_open() -> bool:
                keys = [HEADER.unpack(row[-HEADER.size :].tobytes())[0] for row in handle.result()]
                worker: Any = cluster.engines[collectives.rank].participants()[0]
                return (worker._announced and not at_ends) or lands(worker, keys)

            handle.done = lambda: done() and is_open()  # type: ignore[method-assign]
            handle.seconds_to_poll = lambda: 0.002  # type: ignore[method-assign]  # (nothing says when ``lands`` would)
            return handle

        collectives.alltoall = alltoall  # type: ignore[method-assign]
        return collectives

    cluster = Cluster(size, wrap=wrap)
    return cluster
