"""States that are saved and resumed in every way, and steps by which other libraries make a state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import state_dict as dcp

import hvd_async.torch as hvd
from hvd_async.testing import Cluster
from tests.conformance.torch_ranks import flat
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
