"""The driver of ranks with weights of their own, with a replica and a worker stood in for; no framework, no ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvd_async.algorithms.gossip.config import GossipOptions
from hvd_async.algorithms.leader.config import LeaderOptions
from hvd_async.errors import ReplicaStateError
from hvd_async.optimizers.agreement import Buffer, Buffers
from hvd_async.optimizers.gossip import GossipDriver
from hvd_async.optimizers.leader import LeaderDriver
from hvd_async.optimizers.methods import GossipMethods
from hvd_async.optimizers.replica import WeightReplica
from hvd_async.runtime.collective_calls import Combined
from hvd_async.runtime.lifecycle import Lifecycle, use_engine
from hvd_async.runtime.process_sets import RankGroup

ALONE = RankGroup(None, (0,), 0, 0, 1)


class Statistic(Buffer):
    """The statistic of ``Weights``."""

    name = key = kind = "statistic"
    is_statistic = True

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def data(self) -> Any:
        return self.values().view(np.uint8)

    def put_data(self, data: Any) -> None:
        self.put_values(data.view(np.float64))

    def values(self) -> Any:
        return np.array([self._weights.statistic])

    def put_values(self, values: Any) -> None:
        self._weights.statistic = float(values[0])


class Weights(WeightReplica):
    """Two weights in an array, and one statistic."""

    def __init__(self) -> None:
        self.weights, self.statistic = np.array([1.0, 2.0]), 5.0

    def prepare(self) -> None: ...

    def read(self) -> Any:
        return self.weights.copy()

    def write(self, weights: Any) -> None:
        self.weights = weights

    def fingerprint(self, resumed: bool) -> tuple[list[str], list[int]]:
        return ["two weights"], [0]

    def message_format(self, received: int, **options: Any) -> Any:
        pytest.fail("no worker of these tests sends weights")

    def is_finite(self, weights: Any) -> bool:
        return bool(np.isfinite(weights).all())

    def describe_nonfinite(self) -> str:
        return "not finite"

    def read_double(self) -> Any:
        return self.weights.copy()

    def buffers(self) -> Buffers:
        return Buffers([Statistic(self)], lambda array: array)

    def statistics(self) -> Any:
        return np.array([self.statistic, 1.0])

    def check_momentum(self) -> None: ...

    def momentum(self) -> Any:
        return np.zeros(2)

    def write_momentum(self, momentum: Any) -> None: ...

    def clip(self, vector: Any, one: Any, other: Any) -> Any:
        return vector


class Worker:
    """One whose ranks have met: it mixes in 10, and what stands for all ranks is 3 times the weights. The other rank's
    statistic is 9, its weights are more by 0.5; rank r sends 100 + r."""

    weight, wants_before, version, agreed, leader, keep = 0.5, False, 4, True, 2, None
    engine = SimpleNamespace(replaced=False, drain=lambda *_: None)
    process_set_id, last_done = 0, 1

    def __init__(self) -> None:
        self.losses: list[float] = []

    def check_step(self) -> None: ...

    def check_outside_consensus(self, what: str) -> None: ...

    def mix(self, before: Any, after: Any) -> Any:
        return after + 10

    def publish(self, weights: Any) -> None: ...

    def consensus(self, weights: Any) -> Any:
        return weights * 3

    def sum(self, vector: Any, what: str) -> Combined:
        other = {
            "the checksum of buffers": 1 - vector,  # it is another
            "the comparison of buffers": np.array([1.0, 1.0]),
            "the average of batch-norm statistics": np.array([9.0, 1.0]),
            "consensus_distance()": vector,
        }[what]
        return Combined(vector + other + 0.5 * (len(vector) == 2 and "distance" in what), [0, 1])

    def broadcast(self, vector: Any, root: int, what: str) -> Any:
        if what == "the broadcast of buffers":
            return np.array([100.0 + root]).view(np.uint8)
        if what == "the names of buffers":  # with another checksum, and as long
            table = json.loads(vector.tobytes())
            table["statistic"][-1] = 0
            return np.frombuffer(json.dumps(table).ljust(len(vector)).encode(), np.uint8)
        return vector

    def record_loss(self, loss: float) -> None:
        self.losses.append(loss)

    def settle_statistics(self, own: Any, clip: Any) -> Any:
        return own + 1


class Optimizer(GossipMethods):
    """A wrapped one."""


def gossip(buffers: str = "average") -> tuple[Optimizer, GossipDriver, Weights]:
    """An optimizer that has met the other ranks."""
    return _attached(lambda lifecycle, weights: GossipDriver(lifecycle, ALONE, weights, GossipOptions(buffers=buffers)))


def leader() -> tuple[Optimizer, LeaderDriver, Weights]:
    """The same, of ranks that follow a leader."""
    options = LeaderOptions(buffers="local")
    return _attached(lambda lifecycle, weights: LeaderDriver(lifecycle, ALONE, weights, options, lambda: 1))


def _attached(make: Callable[[Lifecycle, Weights], Any]) -> Any:
    weights, optimizer = Weights(), Optimizer()
    with use_engine(SimpleNamespace(rank=0, size=1)):  # type: ignore[arg-type]
        driver = make(Lifecycle(lambda: None, (), lambda: None), weights)  # type: ignore[arg-type, return-value]
    driver.attach(optimizer).__class__ = Optimizer
    driver.worker = Worker()
    return optimizer, driver, weights


def test_a_step_has_two_halves():
    optimizer, driver, weights = gossip()
    assert driver.begin_step() == (0.5, False, True)
    end = driver.end_step(None, weights.read())
    assert end.weights.tolist() == [10.5, 11.0]  # (mixed as the weights times the push-sum weight)
    assert end.statistics is None
    assert optimizer.rounds == 4
    driver.publish(end.weights)
    driver.begin_step()  # (the one before it has ended)


def test_a_step_that_is_not_finite_breaks_the_optimizer():
    optimizer, driver, _ = gossip()
    driver.begin_step()
    with pytest.raises(FloatingPointError, match="not finite"), driver.updating():
        driver.end_step(None, np.array([np.nan, 0.0]))
    for call in (optimizer.drain, optimizer.cut, driver.begin_step, driver.drain_all):
        with pytest.raises(ReplicaStateError, match=r"broken off: FloatingPointError: not finite.*from a checkpoint"):
            call()


def test_a_step_that_never_ends_breaks_the_optimizer():
    """An op of a graph has failed between its halves: nobody hears of that."""
    _, driver, _ = gossip()
    driver.begin_step()
    with pytest.raises(ReplicaStateError, match="an op of the training step's graph failed"):
        driver.begin_step()


def test_an_error_of_the_wrapped_step_breaks_the_optimizer():
    _, driver, _ = gossip()
    driver.begin_step()
    with pytest.raises(ZeroDivisionError), driver.updating():
        raise ZeroDivisionError("boom")
    with pytest.raises(ReplicaStateError, match="broken off: ZeroDivisionError: boom"):
        driver.worker_now()


def test_the_optimizer_is_kept_from_its_step_on():
    """Others count on its weights until the worker lets go of it."""
    optimizer, driver, weights = gossip()
    driver.begin_step()
    with driver.updating():
        driver.end_step(None, weights.read())
    assert driver.worker.keep is optimizer


@pytest.mark.parametrize(("buffers", "statistic"), [("average", 7.0), ("root", 100.0), ("local", 5.0)])
def test_in_consensus_the_model_holds_what_stands_for_all_and_then_its_own_again(buffers: str, statistic: float):
    optimizer, _, weights = gossip(buffers)
    with optimizer.consensus():
        assert weights.weights.tolist() == [1.5, 3.0]
        assert weights.statistic == statistic
    assert weights.weights.tolist() == [1.0, 2.0]
    assert weights.statistic == 5.0


def test_consensus_of_ranks_that_keep_their_statistics_takes_the_leaders():
    optimizer, _, weights = leader()
    with optimizer.consensus():
        assert weights.statistic == 102.0


def test_losses_are_handed_over_when_a_step_begins():
    """The binding's own counts where nothing was recorded."""
    _, driver, weights = leader()
    driver.record_loss(1)
    driver.begin_step(9.0)
    end = driver.end_step(None, weights.read(), weights.statistics())
    assert end.statistics.tolist() == [6.0, 2.0]
    driver.publish(end.weights)
    driver.begin_step(2.0)
    assert driver.worker.losses == [1.0, 2.0]


def test_the_distance_is_the_root_of_the_mean_square_over_ranks():
    """Two elements, each 0.25 from the mean on both ranks."""
    assert gossip()[0].consensus_distance() == pytest.approx((2 * 0.25**2) ** 0.5)


@pytest.mark.parametrize("own", [np.nan, np.inf, -np.inf])
def test_a_rank_whose_statistics_are_not_finite_takes_the_others_and_is_told_which(own):
    _, driver, weights = gossip()
    weights.statistic = own
    with pytest.warns(UserWarning, match="buffers statistic are not finite on this rank"):
        driver.unify_buffers()
    assert weights.statistic == 9.0


def test_beside_others_allreduce_averages_at_each_step():
    """Alone it averages every so many steps; where it is a phase, that says what the other algorithms do."""
    options = GossipOptions(average_every=10, schedule={0: "allreduce", 5: "sgp"})
    _, driver, _ = _attached(lambda lifecycle, weights: GossipDriver(lifecycle, ALONE, weights, options))
    driver.worker = None
    assert driver.plan.config.average_every == 1
    driver.set_epoch(5)
    assert (driver.plan.config.algorithm, driver.plan.config.average_every) == ("sgp", 10)
    alone = GossipOptions("allreduce", average_every=10)
    _, driver, _ = _attached(lambda lifecycle, weights: GossipDriver(lifecycle, ALONE, weights, alone))
    assert driver.plan.config.average_every == 10
