"""torch: steps that a rank announces at the hand-over of their first bucket, and what becomes of them.

The plane is a late one, on which ranks announce steps: here from the second or third one on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch

from hvd_async import testing
from hvd_async.algorithms.eager import rank as eager_rank
from hvd_async.algorithms.eager.config import ReportReceived, RoundsReceived
from hvd_async.errors import ReplicaStateError
from hvd_async.runtime.lifecycle import local_engine
from hvd_async.testing import Cluster
from tests.conformance import fake_gpu
from tests.conformance.eager_ranks import MOMENTUM, TINY
from tests.conformance.torch_ranks import TorchTrainer, TorchVectors

STEADY = 1
"""Steps with constant hyperparameters before one is announced; the first step of all does not count."""
PLANES = (testing.MemoryCollectives, fake_gpu.LateCollectives)


@pytest.fixture(autouse=True)
def announced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Return a list to which each announcement is added: its rank and step."""
    log: list[tuple[int, int]] = []
    announce = eager_rank.RoundsInFlight.announce

    def noting(self: Any, number: int, step: int, *others: Any) -> None:
        log.append((self._engine.rank, step))
        announce(self, number, step, *others)

    monkeypatch.setattr(eager_rank.RoundsInFlight, "announce", noting)
    monkeypatch.setattr(eager_rank, "STEADY", STEADY)
    monkeypatch.setattr(testing, "MemoryCollectives", fake_gpu.LateCollectives)
    return log


engine: Callable[[], Any] = local_engine
"""This rank's."""


def two_buckets(lr: float = 1.0) -> TorchVectors:
    """Return a rank whose second vector's gradient leaves first; the first one's may be missing until ``step()``."""
    return TorchVectors([2, 2], lambda ps: torch.optim.SGD(ps, lr=lr), quorum="all", bucket_cap_mb=TINY)


def begun(*gradients: Any) -> TorchVectors:
    """Return a rank that has taken three steps, and of the fourth has run backward with these gradients."""
    one = two_buckets()
    for _ in range(3):
        one.take(1.0, 1.0)
    if gradients:
        one.backward([gradients])
    return one


def fourth_has_started(one: Any) -> None:
    """Wait until this rank's engine has seen the round of the fourth step start."""
    in_flight = one.opt._async.worker._in_flight
    engine().wait(lambda: in_flight.announced_start == 4)


def drained(one: TorchVectors) -> list[float]:
    """Return a rank's weights after a drain."""
    one.opt.drain()
    weights: list[float] = one.weights().tolist()
    return weights


# -- the same rounds ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [(6, 6), (6, 3), (2, 6)], ids=str)
def test_announced_rounds_have_the_bits_of_others(counts, announced, monkeypatch):
    """Rates change between steps, and ranks have different numbers of these."""

    def train(rank: int) -> list[bytes]:
        trainer, seen = TorchTrainer(MOMENTUM, quorum="all", bucket_cap_mb=TINY), []
        for end in range(2):
            for step in range(counts[(rank + end) % 2]):
                trainer.set_rate(0.1 / (1 + step + end))
                trainer.train(rank, range(step, step + 1))
                seen.append(trainer.weights().tobytes())
            trainer.opt.drain()
            seen.append(trainer.weights().tobytes())
        assert trainer.opt.stats().gradients_applied == 2 * sum(counts)
        return seen

    found = []
    for plane, agree in [(PLANES[1], "1"), (PLANES[1], "0"), (PLANES[0], "1")]:
        announced.clear()
        monkeypatch.setattr(testing, "MemoryCollectives", plane)
        monkeypatch.setenv("HVD_ASYNC_AGREE", agree)
        found.append(Cluster(2).run(train))
        assert bool(announced) is (len(found) == 1)
    assert found[0] == found[1] == found[2]
    assert found[0][0][-1] == found[0][1][-1]


@pytest.mark.parametrize("steps", [[3], [2, 3, 4, 5, 6, 7]], ids=["once", "always"])
def test_a_rate_that_changes_between_backward_and_step_on_one_rank_is_the_announced_one_or_its_own(steps, announced):
    """(Both ranks lead at times: which one does depends on who is first.)"""

    def train(rank: int) -> tuple[list[float], int]:
        one = two_buckets(0.5)
        for step in range(8):
            one.backward([[1.0, 1.0]])
            if rank == 0 and step in steps:
                one.set_rate(one.rate() / 2)
            one.opt.step()
        one.opt.drain()
        return one.weights().tolist(), one.opt._async.worker.steady

    (first, steady), (second, always) = Cluster(2).run(train)
    assert first == second
    assert steady == (4 if len(steps) == 1 else 0)
    assert always >= 6
    steps_of_first = {step for rank, step in announced if rank == 0}
    assert steps_of_first == ({3, 4, 6, 7, 8} if len(steps) == 1 else {3})


def test_a_round_keeps_the_hyperparameters_that_were_announced():
    def train(rank: int) -> list[float]:
        one, seen = two_buckets(0.5), []
        for step in range(6):
            one.backward([[1.0, 1.0]])
            if step == 4:
                one.set_rate(0.25)
            one.opt.step()
            seen.append(-float(one.weights()[0]))
        return seen

    assert Cluster(2).run(train) == [[0.5, 1.0, 1.5, 2.0, 2.5, 2.75]] * 2


def test_ranks_that_set_the_option_differently_are_refused():
    def train(rank: int) -> None:
        one = two_buckets()
        driver = one.opt._async
        config_for = driver.config_for
        driver.config_for = lambda nbytes: msgspec.structs.replace(config_for(nbytes), agree=rank == 0)
        one.take(1.0, 1.0)

    for outcome in Cluster(2).outcomes(train):
        assert "agree" in str(outcome)


# -- steps that do not finish ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_ends_between_backward_and_step_gives_zeros_for_the_rest(first, announced):
    def train(rank: int) -> list[float]:
        one = begun(None, 2.0)
        if rank != first:
            fourth_has_started(one)
            one.opt.step()
        engine().drain(leaving=True)
        return one.weights().tolist()

    assert Cluster(2).run(train) == [[-3.0, -3.0, -5.0, -5.0]] * 2
    assert (first, 4) in announced


@pytest.mark.parametrize(("started", "rest"), [(True, False), (False, False), (False, True)])
def test_a_discarded_optimizer_gives_zeros_for_the_rest(started, rest, announced):
    gone = threading.Event()

    def train(rank: int) -> list[float]:
        one = begun()
        if rank == 0:
            one.backward([[None, 2.0]])
            if started:
                fourth_has_started(one)
            if rest:
                one.opt._async.worker.pending()  # (the engine has announced the step)
                one.parameters[0].sum().backward()
            one.opt.discard()
            gone.set()
            return []
        if not started:
            assert gone.wait(60.0)
        one.take(1.0, 2.0)
        one.take(1.0, 2.0)
        return drained(one)

    weight = -4.5 if rest else -4.0
    assert Cluster(2).run(train)[1] == [weight, weight, -6.0, -6.0]
    assert (0, 4) in announced


def test_a_drain_between_backward_and_step_is_refused_and_the_step_can_follow(announced):
    def train(rank: int) -> list[float]:
        one = begun(None, 2.0)
        for finish in (one.opt.drain, one.opt.cut):
            with pytest.raises(ReplicaStateError, match=r"has followed: call optimizer\.step\(\) first"):
                finish()
        with pytest.raises(ReplicaStateError, match="between backward"):
            one.opt.zero_grad()
        one.opt.step()
        return drained(one)

    assert Cluster(2).run(train) == [[-3.0, -3.0, -5.0, -5.0]] * 2
    assert {(0, 4), (1, 4)} <= set(announced)


def test_a_rank_that_has_not_given_what_it_announced_does_not_answer_a_roll_call():
    """(So the coordinator names it.)"""

    def train(rank: int) -> list[int]:
        one = begun(None, 1.0)
        fourth_has_started(one)
        here, worker, sent, seen = engine(), one.opt._async.worker, [], []
        send, looked = here.send, threading.Event()

        def noting(event: Any) -> None:
            if isinstance(event, RoundsReceived):
                sent.append(event.call)
            else:
                send(event)

        here.send = noting  # type: ignore[method-assign]
        here.call_soon(lambda: worker.on_command(ReportReceived(0, 7)))
        here.call_soon(looked.set)
        assert looked.wait(60.0)
        seen += sent
        one.opt.step()
        one.opt.drain()
        return [*seen, -1, *sent]

    assert Cluster(2).run(train) == [[-1, 7]] * 2


# -- several optimizers ------------------------------------------------------------------------------------------------


def test_two_optimizers_announce_nothing_and_may_step_in_any_order(announced):
    def train(rank: int) -> list[float]:
        first, second = two_buckets(), two_buckets()
        for _ in range(4):
            first.backward([[None, 1.0]])
            second.backward([[None, 1.0]])
            second.opt.step()
            first.opt.step()
        return [*drained(first), *second.weights().tolist()]

    assert Cluster(2).run(train) == [[0.0, 0.0, -4.0, -4.0] * 2] * 2
    assert all(step <= 1 for _, step in announced)


@pytest.mark.parametrize("whole", [True, False])
def test_an_optimizer_that_joins_between_backward_and_step_of_another_is_refused_or_waits_for_nothing(whole):
    def train(rank: int) -> list[float]:
        first, second = begun(1.0 if whole else None, 1.0), two_buckets()
        second.backward([[None, 1.0]])
        if not whole:
            with pytest.raises(ReplicaStateError, match="HVD_ASYNC_AGREE=0"):
                second.opt.step()
            first.opt.step()
        second.opt.step()
        if whole:
            first.opt.step()
        return [*drained(first), *second.weights().tolist()]

    own = [-4.0, -4.0] if whole else [-3.0, -3.0]
    assert Cluster(2).run(train) == [[*own, -4.0, -4.0, 0.0, 0.0, -1.0, -1.0]] * 2
