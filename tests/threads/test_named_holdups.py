"""A rank that stands in the way of a round that has fired is named."""

from __future__ import annotations

import threading

import hvd_async.runtime.coordinator
from hvd_async.testing import Cluster
from tests.threads.test_failures import make_worker, take_step
from tests.threads.workload import plan


def test_a_rank_whose_engine_stands_still_is_named_though_its_round_has_fired(monkeypatch):
    """As one whose training thread holds the GIL: it has arrived nowhere, and the others wait in its collective."""
    said, one = threading.Event(), plan("solo", 4, [1, 1, 1])

    def warn(text: str) -> None:
        if "round 1, which has begun, of optimizer 0 has waited 0 s more for rank(s) 2 (host2)" in text:
            said.set()

    def train(rank: int) -> None:
        worker, _ = make_worker(one.config, one)
        worker.connect(["w"], [1])
        if rank == 2:
            worker.engine.call_soon(lambda: said.wait(30))
            ready.set()
        else:
            assert ready.wait(30)
            take_step(worker, one, 1)
        assert said.wait(30)
        worker.drain()

    ready = threading.Event()
    monkeypatch.setattr(hvd_async.runtime.coordinator, "warn", warn)
    Cluster(3, warn_after=0.2).run(train)
