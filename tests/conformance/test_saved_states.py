"""States that are saved and resumed in every way, and steps by which other libraries make a state."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
from torch.distributed.checkpoint import state_dict as dcp

import hvd_async.tensorflow.keras as hvd_keras
import hvd_async.torch as hvd
from hvd_async.testing import Cluster
from tests.conformance.torch_ranks import flat
from tests.conformance.weight_ranks import KerasRank, TorchRank, both
from tests.covering import covering

# -- steps that train nothing -------------------------------------------------------------------------------------

MODES: dict[str, tuple[Any, dict[str, Any]]] = {
    "all": (hvd.EagerOptimizer, {"quorum": "all"}),
    "solo": (hvd.EagerOptimizer, {"quorum": "solo", "max_staleness": 0}),
    "sgp": (hvd.GossipOptimizer, {"algorithm": "sgp"}),
    "adpsgd": (hvd.GossipOptimizer, {"algorithm": "adpsgd", "topology": "ring"}),
    "diloco": (hvd.GossipOptimizer, {"algorithm": "diloco", "average_every": 2}),
    "noloco": (hvd.GossipOptimizer, {"algorithm": "noloco", "topology": "random-pairs", "gossip_every": 2}),
    "lsgd": (hvd.LeaderOptimizer, {"algorithm": "lsgd", "group": 2, "global_period": 2}),
    "easgd": (hvd.LeaderOptimizer, {"algorithm": "easgd", "global_period": 2}),
}
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "dampened": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, dampening=0.5),
    "adam": lambda p: torch.optim.AdamW(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


def get_and_set(model: Any, opt: Any) -> None:
    """Load what the state is again."""
    weights, state = dcp.get_state_dict(model, opt)
    dcp.set_state_dict(model, opt, model_state_dict=weights, optim_state_dict=state)


def get_flat(model: Any, opt: Any) -> None:
    """Get the states for a pipeline."""
    dcp.get_state_dict(model, opt, options=dcp.StateDictOptions(flatten_optimizer_state_dict=True))


def dummy_step(model: Any, opt: Any) -> None:
    """Make a state as a library does that knows no other way."""
    if opt.state:
        return
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    rate, opt.param_groups[0]["lr"] = opt.param_groups[0]["lr"], 0.0
    opt.step()
    opt.param_groups[0]["lr"] = rate
    opt.zero_grad()


CALLS: dict[str, Any] = {
    "get": dcp.get_optimizer_state_dict,
    "flat": get_flat,
    "set": get_and_set,
    "step": dummy_step,
}


@pytest.mark.parametrize(
    ("mode", "optimizer", "call", "ranks", "before"),
    [
        (mode, optimizer, call, (0, 1) if call == "set" else ranks, before)
        for mode, optimizer, call, ranks, before in covering(
            (tuple(MODES), tuple(OPTIMIZERS), tuple(CALLS), ((0,), (0, 1)), (True, False)), 2
        )
        if call != "set" or optimizer not in ("rprop", "dampened")  # (what a first step makes is not torch's zeros)
    ],
    ids=str,
)
def test_a_step_that_makes_a_state_is_none(mode, optimizer, call, ranks, before):
    """Weights and counts are those of a run in which no rank saves, also before the ranks have met."""
    make, options = MODES[mode]

    def train(rank: int, saves: bool) -> Any:
        model = torch.nn.Linear(3, 1)
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(0.5)
        opt = make(OPTIMIZERS[optimizer](model.parameters()), model.named_parameters(), **options)

        def save() -> None:
            if saves and rank in ranks:
                CALLS[call](model, opt)

        if before:
            save()
        for step in range(6):
            if step == 4:
                opt.drain()
                opt.zero_grad()
                save()
            opt.zero_grad()
            loss = model(torch.full((2, 3), 0.5 + 0.1 * step)).square().mean()
            loss.backward()
            if hasattr(opt, "record_loss"):
                opt.record_loss(loss)
            opt.step()
        opt.drain()
        return flat(model.parameters()), opt.stats().steps, opt.rounds

    whole = Cluster(2).run(lambda rank: train(rank, False))
    for own, saved in zip(whole, Cluster(2).run(lambda rank: train(rank, True)), strict=True):
        assert saved[1] == own[1] == 6
        assert mode != "all" or saved[2] == own[2]
        if mode not in ("solo", "adpsgd", "lsgd", "easgd"):  # (which rank leads, or meets which one, varies)
            np.testing.assert_allclose(saved[0], own[0], rtol=1e-5)


# -- averages of schedule-free optimizers -------------------------------------------------------------------------


class ScheduleFree(torch.optim.Optimizer):
    """SGD without a schedule (Defazio et al., 2024, with beta = 0.9), as its authors' package has it: the weights are y
    while it trains, and x in between."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05, "k": 0})

    def eval(self) -> None:
        self._move(1 - 1 / 0.9)

    def train(self) -> None:
        self._move(0.1)

    @torch.no_grad()
    def _move(self, weight: float) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], weight)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, 1 / group["k"])
                p.add_(p.grad, alpha=group["lr"] * (0.9 * (1 - 1 / group["k"]) - 1))
                z.sub_(p.grad, alpha=group["lr"])


MIXED = [mode for mode in MODES if mode not in ("all", "solo")]


@pytest.mark.parametrize("mode", MIXED)
def test_averages_of_a_schedule_free_optimizer_agree_after_a_drain(mode):
    make, options = MODES[mode]

    def train(rank: int) -> Any:
        p = torch.nn.Parameter(torch.zeros(3))
        opt = make(ScheduleFree([p]), **options)
        for step in range(4 + rank):
            opt.zero_grad()
            loss = (p - 1.0 - rank - step).square().sum()
            loss.backward()
            if hasattr(opt, "record_loss"):
                opt.record_loss(loss)
            opt.step()
        opt.drain()
        opt.eval()
        return flat([p]).tobytes()

    one, other = Cluster(2).run(train)
    assert one == other


@pytest.mark.parametrize("mode", MIXED)
def test_averages_of_keras_schedule_free_optimizer_agree_after_a_drain(mode):
    wrapper, options = MODES[mode][0].__name__, MODES[mode][1]

    def train(rank: int) -> Any:
        v = keras.Variable(np.zeros(3, np.float32))
        opt = getattr(hvd_keras, wrapper)(keras.optimizers.ScheduleFreeAdamW(0.1), **options)
        opt.build([v])
        for step in range(4 + rank):
            if hasattr(opt, "record_loss"):
                opt.record_loss(float(rank))
            opt.apply([tf.convert_to_tensor(v) - 1.0 - rank - step], [v])
        opt.drain()
        return np.asarray(v).tobytes(), np.asarray(opt._momentums[0]).tobytes()

    one, other = Cluster(2).run(train)
    assert one == other


@both
def test_schedule_free_optimizers_work_on_biased_weights(binding):
    """On a star the push-sum weights are not 1. Without gradients nothing moves."""

    def make(parameters: Any) -> Any:
        return ScheduleFree(parameters) if binding is TorchRank else keras.optimizers.ScheduleFreeAdamW(0.1)

    def train(rank: int) -> Any:
        one = binding(binding.least_squares(3), rank, make=make, algorithm="sgp", topology="star")
        one.assign(np.ones(6))
        if binding is KerasRank:
            for v, z in zip(one.parameters, one.opt._momentums, strict=True):
                z.assign(v)
        for _ in range(5):
            one.take(np.zeros(6))
        assert one.opt.stats().push_sum_weight != 1.0
        return one.weights()

    for weights in Cluster(3).run(train):
        np.testing.assert_allclose(weights, 1.0, rtol=1e-5)
