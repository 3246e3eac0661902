"""Push-sum of hosts of ranks as threads: messages of other hosts at a cut. (``test_gossip`` has the rest.)"""

from __future__ import annotations

import threading
from typing import Any

from hvd_async.algorithms.gossip.config import STAGES, ExchangeDone
from hvd_async.algorithms.gossip.hosts import GOSSIP
from hvd_async.algorithms.gossip.rank import PushSumWorker
from tests.threads.gossip_holdups import GATE_TIMEOUT, holding
from tests.threads.gossip_workload import check_sums, job, run, work


def test_what_another_host_sent_late_survives_a_cut():
    """Host 0's message of step 2 is on its way when host 1 learns that all are done; after the cut host 0 is a step
    ahead, and its next message of that number comes before host 1 takes that step."""
    step_2, reported, released = 2 * STAGES + GOSSIP, set[int](), set[int]()
    behind, ahead = threading.Barrier(4), threading.Barrier(4)
    received: dict[int, list[int]] = {place: [] for place in range(4)}
    one = job(((2,) * 4, (2,) * 4), "osgp", max_staleness=1, local_size=2, cuts=frozenset({0}), saves=False)

    def lands(worker: Any, keys: list[int]) -> bool:
        if step_2 in keys and worker._place >= 2 and worker._place not in released:
            if worker._place not in reported:  # (as if its first message had gone to another rank, which has it)
                reported.add(worker._place)
                worker.engine.send(ExchangeDone(worker.number, worker._exchanges.carrier.completed + 1))
            if worker._drained is None:
                return False
            released.add(worker._place)
        return True

    def tweak(worker: PushSumWorker) -> None:
        deliver, own = worker._exchanges._deliver, received[worker._place]

        def counted(sender: int, key: int, weight: float, data: Any) -> None:
            deliver(sender, key, weight, data)
            own.extend([key] * (key % STAGES == GOSSIP))

        worker._exchanges._deliver = counted

    def before_step(place: int, step: int, worker: PushSumWorker) -> None:
        if place < 2 and step == 2:
            behind.wait(GATE_TIMEOUT)  # (what is held up must be all that an exchange brings)
        if place >= 2 and step == 4:
            ahead.wait(GATE_TIMEOUT)
            worker.engine.wait(lambda: len(received[place]) == 4)

    def before_end(place: int, worker: PushSumWorker) -> None:
        if place >= 2 and not worker._before:
            behind.wait(GATE_TIMEOUT)
        if place < 2 and worker._before:
            ahead.wait(GATE_TIMEOUT)

    train = work(one, before_step=before_step, tweak=tweak, before_end=before_end)
    check_sums(one, holding(4, lands, at_ends=True).run(train))
    assert released == {2, 3}


def test_a_state_after_a_cut_is_the_ranks_own_whatever_another_host_does_meanwhile():
    def tweak(worker: PushSumWorker) -> None:
        kept = worker.saved_state

        def late() -> Any:
            if worker._place >= 2 and worker._drained is None and not worker._together:
                worker.engine.wait(lambda: bool(worker._receive_buffer.received))  # of the other host's next step
            return kept()

        worker.saved_state = late  # type: ignore[method-assign]

    one = job(((2,) * 4, (1,) * 4), local_size=2, cuts=frozenset({0}))
    records = run(one, tweak=tweak)
    check_sums(one, records)
    assert all(record.saved[0] is not None for record in records)
