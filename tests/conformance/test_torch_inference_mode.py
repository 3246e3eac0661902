"""Ends inside ``torch.inference_mode()``, as evaluation loops call them: training goes on as without it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import hvd_async.torch as hvd
from hvd_async.testing import Cluster

EAGER: dict[str, dict[str, Any]] = {"all": {"quorum": "all"}, "solo": {"quorum": "solo"}}
GOSSIP: dict[str, dict[str, Any]] = {
    "sgp": {},
    "osgp": {"max_staleness": 2},
    "dpsgd": {"quasi_global": True},
    "adpsgd": {"max_local_steps": 2},
    "exact-diffusion": {},
    "local": {"average_every": 2},
    "slowmo": {"average_every": 2},
    "diloco": {"average_every": 2},
    "noloco": {"gossip_every": 2},
}
LEADER: dict[str, dict[str, Any]] = {"lsgd": {"global_period": 2, "group": 1}, "easgd": {"global_period": 2}}
IN_STEP = ("all", "sgp", "dpsgd", "exact-diffusion", "local", "slowmo", "diloco")
"""Algorithms whose ranks end with the same weights each time."""


def wrapped(name: str, model: torch.nn.Module) -> Any:
    """The model's optimizer."""
    if name == "dpsgd":
        plain: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    else:
        plain = torch.optim.AdamW(model.parameters(), lr=0.01)
    given: dict[str, Any] = {"named_buffers": model.named_buffers()}
    if name in EAGER:
        return hvd.EagerOptimizer(plain, **EAGER[name], **given)
    if name in GOSSIP:
        return hvd.GossipOptimizer(plain, algorithm=name, **GOSSIP[name], **given)
    return hvd.LeaderOptimizer(plain, algorithm=name, **LEADER[name], **given)


@contextlib.contextmanager
def no_mode() -> Iterator[None]:
    """The usual one."""
    yield


def run(name: str, early: bool, mode: Any) -> list[list[torch.Tensor]]:
    """Train, with ends inside ``mode``; return each rank's weights and buffers."""

    torch.manual_seed(1)
    first = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))

    def train(rank: int) -> list[torch.Tensor]:
        model = copy.deepcopy(first)
        optimizer = wrapped(name, model)
        draw = torch.Generator().manual_seed(rank)

        def step() -> None:
            inputs = torch.randn(16, 4, generator=draw)
            optimizer.zero_grad()
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            loss.backward()
            if hasattr(optimizer, "record_loss"):
                optimizer.record_loss(loss)
            optimizer.step()

        if early:
            with mode():
                optimizer.drain()
        for end in ("consensus", "drain", "cut", "distance", "drain"):
            step()
            step()
            with mode():
                if end == "consensus":
                    with optimizer.consensus():
                        assert torch.is_inference_mode_enabled() == (mode is torch.inference_mode)
                        model(torch.ones(3, 4))
                elif end == "distance":
                    optimizer.consensus_distance()
                else:
                    getattr(optimizer, end)()
                assert torch.is_inference_mode_enabled() == (mode is torch.inference_mode)
        if name == "local":
            with mode():
                optimizer.switch(average_every=3)
        step()
        assert torch.is_grad_enabled()
        optimizer.drain()
        states = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        held = [*model.parameters(), *model.buffers()]
        assert not any(tensor.is_inference() for tensor in [*held, *states])
        return [tensor.detach().clone() for tensor in held]

    return Cluster(2).run(train)


@pytest.mark.parametrize("early", [False, True], ids=["after steps", "before the first step"])
@pytest.mark.parametrize("name", [*EAGER, *GOSSIP, *LEADER])
def test_ends_in_inference_mode_leave_everything_as_ends_outside_of_it(name, early):
    ranks = run(name, early, torch.inference_mode)
    for one, other in zip(*ranks, strict=True):
        assert torch.equal(one, other)
    if name in IN_STEP:
        for one, usual in zip(ranks[0], run(name, early, no_mode)[0], strict=True):
            assert torch.equal(one, usual)
