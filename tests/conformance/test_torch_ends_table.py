"""The table of ends in torch."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import hvd_async.torch as hvd
from tests.conformance.ends_table import EVERY, RANKS, SOME, Cell, check, run

WRAPPERS: dict[str, Any] = {
    "solo": lambda opt, **o: hvd.EagerOptimizer(opt, quorum="solo", **o),
    "all": lambda opt, **o: hvd.EagerOptimizer(opt, quorum="all", **o),
    "sgp": lambda opt, **o: hvd.GossipOptimizer(opt, algorithm="sgp", **o),
    "dpsgd": lambda opt, **o: hvd.GossipOptimizer(opt, algorithm="dpsgd", **o),
    "adpsgd": lambda opt, **o: hvd.GossipOptimizer(opt, algorithm="adpsgd", topology="ring", **o),
    "lsgd": lambda opt, **o: hvd.LeaderOptimizer(opt, algorithm="lsgd", group=RANKS, global_period=4, **o),
    "easgd": lambda opt, **o: hvd.LeaderOptimizer(opt, algorithm="easgd", global_period=4, **o),
}


@pytest.fixture(autouse=True, scope="module")
def quick_garbage_collection() -> Iterator[None]:
    """What was there before these tests is looked at no more: both frameworks are many objects."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def make(wrapper: str, buffers: bool, seed: int) -> tuple[torch.nn.Module, Any]:
    """A model and its optimizer, the same on all ranks."""
    layers = [torch.nn.Linear(2, 3), *([torch.nn.BatchNorm1d(3)] if buffers else []), torch.nn.Linear(3, 1)]
    model = torch.nn.Sequential(*layers)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape) + 0.1 * seed)
    named = {"named_buffers": model.named_buffers()} if buffers else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, WRAPPERS[wrapper](optimizer, named_parameters=model.named_parameters(), **named)


def step(model: torch.nn.Module, optimizer: Any, rank: int, number: int) -> None:
    """One step on this rank's own data."""
    inputs = torch.tensor([[rank + number * 0.1, 1.0], [0.5, -rank], [number, 0.3]], dtype=torch.float32)
    optimizer.zero_grad()
    loss = model(inputs).square().mean()
    loss.backward()
    if hasattr(optimizer, "record_loss"):
        optimizer.record_loss(loss)
    optimizer.step()


def state(model: torch.nn.Module) -> np.ndarray[Any, Any]:
    """Weights and buffers."""
    return np.concatenate([t.double().reshape(-1).numpy() for t in model.state_dict().values()])


@pytest.mark.parametrize("cell", EVERY)
def test_partial_allreduce(cell: Cell):
    check(cell, run(cell, lambda seed: make("solo", cell.buffers, seed), step, state))


@pytest.mark.parametrize("cell", SOME)
@pytest.mark.parametrize("wrapper", [name for name in WRAPPERS if name != "solo"])
def test_other_algorithms(wrapper: str, cell: Cell):
    check(cell, run(cell, lambda seed: make(wrapper, cell.buffers, seed), step, state))
