"""The torch half of the jobs that are for both frameworks: models, data, checksums, training of three kinds."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from typing import Any

import torch
from common import WHOLE_DTYPES, Straggler, integers, whole_start
from table import Promise

import hvd_async.torch as hvd
from tests.conformance.cases import CASES
from tests.conformance.gossip_reference import batch, least_squares

torch.set_num_threads(1)
OWN = os.environ.get("HOROVOD_RANK") or os.environ.get("RANK", "0")
os.environ["NCCL_HOSTID"] = f"rank{OWN}"  # (else NCCL refuses ranks that share a GPU)
DEVICE = torch.device(os.environ.get("HVD_ASYNC_TEST_DEVICE", "cpu"))
"""Where models and batches are; made on the CPU, so that they are the same everywhere."""
torch.backends.cudnn.allow_tf32 = False
torch.backends.cudnn.deterministic = True
CASE = next(case for case in CASES if case.name == "nesterov")


def crc(tensors: Iterable[torch.Tensor]) -> int:
    """CRC-32 over the bytes of all tensors, in order."""
    value = 0
    for tensor in tensors:
        value = zlib.crc32(tensor.detach().cpu().contiguous().numpy().tobytes(), value)
    return value


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The optimizer's state, ordered by parameter and by name. (``state_dict()`` may be refused in mid-training.)"""
    states = [optimizer.state.get(p, {}) for group in optimizer.param_groups for p in group["params"]]
    values = [state[key] for state in states for key in sorted(state)]
    return [torch.as_tensor(value) for value in values if value is not None]


def mlp(seed: int) -> torch.nn.Sequential:
    """8 -> 16 -> 4."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)).to(DEVICE)


class Batches:
    """A rank's own random batches of the MLP."""

    def __init__(self, rank: int) -> None:
        self._generator = torch.Generator().manual_seed(1000 + rank)

    def backward(self, model: torch.nn.Module) -> None:
        """One batch: gradients into ``p.grad``."""
        x = torch.randn(16, 8, generator=self._generator)
        y = torch.randint(0, 4, (16,), generator=self._generator)
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(x.to(DEVICE)), y.to(DEVICE)).backward()


class WholeTraining:
    """Parameters of whole numbers, trained by an EagerOptimizer with these options and SGD of learning rate 1."""

    def __init__(self, **options: Any) -> None:
        self.parameters = [
            torch.nn.Parameter(torch.tensor(start, dtype=getattr(torch, dtype), device=DEVICE))
            for start, dtype in zip(whole_start(), WHOLE_DTYPES, strict=True)
        ]
        plain = torch.optim.SGD(self.parameters, lr=1.0)
        self.optimizer = hvd.EagerOptimizer(plain, **{"quorum": "solo", **options})

    def step(self, rank: int, step: int) -> None:
        """A step with that rank's gradient of that step."""
        gradients = [integers(tuple(p.shape), rank, step, index) for index, p in enumerate(self.parameters)]
        parts = [(p * torch.tensor(g, device=DEVICE)).sum() for p, g in zip(self.parameters, gradients, strict=True)]
        torch.autograd.backward(parts)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> list[list[float]]:
        """The weights now."""
        return [p.detach().double().reshape(-1).tolist() for p in self.parameters]


class LeastSquares:
    """One rank's model of ``gossip_reference``, trained by a wrapped optimizer; ``loss_of``: its losses."""

    def __init__(self, wrapper: Any, loss_of: Any = None, **options: Any) -> None:
        start = least_squares(1, CASE).start[0]
        self.parameter = torch.nn.Parameter(torch.tensor(start, dtype=torch.float32, device=DEVICE))
        plain = torch.optim.SGD(
            [self.parameter], lr=CASE.lr, momentum=CASE.momentum, nesterov=CASE.nesterov, weight_decay=CASE.weight_decay
        )
        self.optimizer = wrapper(plain, [("w", self.parameter)], **options)
        self._loss_of = loss_of

    def step(self, rank: int, step: int) -> None:
        """A step on that rank's batch of that step."""
        weights = self.parameter.detach().double().cpu().numpy()
        if self._loss_of is not None and (loss := self._loss_of(weights, rank, step)) is not None:
            self.optimizer.record_loss(torch.tensor(loss, dtype=torch.float64))
        inputs, targets = (torch.tensor(part, dtype=torch.float32, device=DEVICE) for part in batch(rank, step))
        self.optimizer.zero_grad()
        (0.5 * torch.mean((inputs @ self.parameter - targets) ** 2)).backward()
        self.optimizer.step()

    def weights(self) -> list[float]:
        """The weights now."""
        values: list[float] = self.parameter.detach().double().tolist()
        return values


def promise(case: Promise) -> tuple[Any, dict[str, Any]]:
    """Momentum, decay and a schedule by every rank's own count, with stragglers: the optimizer, checksums."""
    model, batches = mlp(seed=1), Batches(hvd.rank())
    optimizer = hvd.EagerOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3),
        named_parameters=model.named_parameters(),
        quorum=case.quorum,
        max_staleness=case.max_staleness,
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    straggler = Straggler(case.inject, hvd.rank(), hvd.size(), seed=3)
    history = []
    for _ in range(case.steps):
        batches.backward(model)
        straggler.compute()
        optimizer.step()
        schedule.step()
        history.append((optimizer.stats().rounds, crc([*model.parameters(), *state_tensors(optimizer)])))
    optimizer.drain()
    return optimizer, {"history": history, "weights": crc(model.parameters()), "state": crc(state_tensors(optimizer))}
