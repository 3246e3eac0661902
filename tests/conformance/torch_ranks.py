"""A small convolutional model in torch, the same on all ranks, and optimizers by case."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import hvd_async.torch as hvd
from tests.conformance.cases import Case, Script
from tests.conformance.drive import ScriptedWorker, attach, scripted_engine
from tests.conformance.reference import Array

torch.set_num_threads(1)


def conv_model(seed: int = 0) -> torch.nn.Module:
    """5x5 images, three classes; the weights by NumPy, since torch's generator is shared between threads."""
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(18, 3))
    random = np.random.default_rng(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.as_tensor(random.normal(size=parameter.shape) * 0.3))
    return model


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each rank's own data."""
    random = np.random.default_rng([rank, step])
    images = torch.as_tensor(random.normal(size=(4, 1, 5, 5)), dtype=torch.float32)
    return images, torch.as_tensor(random.integers(0, 3, 4))


def plain(case: Case, parameters: Any) -> torch.optim.Optimizer:
    """torch's optimizer for a case."""
    if case.kind == "adam":
        return torch.optim.Adam(parameters, lr=case.lr, weight_decay=case.weight_decay)
    return torch.optim.SGD(
        parameters, lr=case.lr, momentum=case.momentum, nesterov=case.nesterov, weight_decay=case.weight_decay
    )


def flat(tensors: Any) -> Array:
    """Tensors as one NumPy vector."""
    return np.concatenate([t.detach().numpy().reshape(-1) for t in tensors]).astype(np.float64)


def backwards(model: torch.nn.Module) -> list[torch.Tensor]:
    """The parameters as they lie in buckets: the last first."""
    return list(model.parameters())[::-1]


class TorchTrainer:
    """One rank."""

    def __init__(self, case: Case, **options: Any) -> None:
        self.model = conv_model()
        options.setdefault("named_parameters", self.model.named_parameters())
        self.opt = hvd.EagerOptimizer(plain(case, self.model.parameters()), **options)

    def gradient(self, rank: int, step: int) -> Array:
        images, labels = batch(rank, step)
        self.opt.zero_grad()
        torch.nn.functional.cross_entropy(self.model(images), labels).backward()
        return flat(p.grad for p in backwards(self.model))

    def step(self) -> None:
        self.opt.step()

    def train(self, rank: int, steps: range) -> None:
        """Several steps."""
        for step in steps:
            self.gradient(rank, step)
            self.step()

    def weights(self) -> Array:
        return flat(backwards(self.model))


class ProcessSet:
    """A process set as Horovod describes one, for ranks that are threads."""

    def __init__(self, *ranks: int, number: int | None = 1) -> None:
        self.ranks, self.process_set_id = list(ranks), number


TINY = 1e-6
"""A ``bucket_cap_mb`` that gives every parameter a bucket of its own."""


def hand_overs(opt: Any) -> list[int]:
    """The buckets that hooks hand over from now on, as they do."""
    worker, log = opt._async.worker_now(), list[int]()
    hand_over = worker.hand_over

    def spy(bucket: int, vector: Any) -> None:
        log.append(bucket)
        hand_over(bucket, vector)

    worker.hand_over = spy
    return log


def wrap_scripted(optimizer: torch.optim.Optimizer, script: Script, size: int = 2, **options: Any) -> Any:
    """A wrapped optimizer that is fed by a script, and its scripted worker."""
    with scripted_engine(size):
        wrapped = hvd.EagerOptimizer(optimizer, **options)
    elements = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    attach(wrapped, ScriptedWorker(script, size, elements, optimizer.param_groups[0]["lr"], torch.as_tensor))
    return wrapped


def quadratic(*values: float) -> torch.nn.Parameter:
    """A parameter of its own, with gradient 1."""
    parameter = torch.nn.Parameter(torch.tensor(values))
    parameter.grad = torch.ones_like(parameter)
    return parameter
