"""Ranks in torch: a small convolutional model, the same on all of them, or vectors; and optimizers by case."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

import hvd_async.torch as hvd
from tests.conformance.cases import Case, Script
from tests.conformance.drive import ScriptedWorker, attach, scripted_engine
from tests.conformance.reference import Array

torch.set_num_threads(1)
torch.ones(1).sqrt()  # (if several threads take the first root of a process, MKL may give one of them 17 bits only)


def _one_at_a_time(look_up: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """Have one thread at a time make the object of an operator: if two do, torch (2.13) may free the one that its
    dispatcher has kept, and ``__torch_dispatch__`` crashes."""
    lock = threading.RLock()

    def look_up_or_wait(self: Any, name: str) -> Any:
        with lock:
            return vars(self)[name] if name in vars(self) else look_up(self, name)

    return look_up_or_wait


for kind in (torch._ops.OpOverloadPacket, torch._ops._OpNamespace):
    kind.__getattr__ = _one_at_a_time(kind.__getattr__)


def seeded(model: torch.nn.Module, seed: int = 0) -> Any:
    """Give a model weights by NumPy, since torch's generator is shared between threads; return the model."""
    random = np.random.default_rng(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.as_tensor(random.normal(size=parameter.shape) * 0.3))
    return model


def conv_model(seed: int = 0) -> Any:
    """5x5 images, three classes."""
    return seeded(
        torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(18, 3)), seed
    )


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each rank's own data."""
    random = np.random.default_rng([rank, step])
    images = torch.as_tensor(random.normal(size=(4, 1, 5, 5)), dtype=torch.float32)
    return images, torch.as_tensor(random.integers(0, 3, 4))


def loss(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    """A rank's loss in a step."""
    images, labels = batch(rank, step)
    return torch.nn.functional.cross_entropy(model(images), labels)


def plain(case: Case, parameters: Any) -> torch.optim.Optimizer:
    """torch's optimizer for a case."""
    if case.kind == "adam":
        return torch.optim.Adam(parameters, lr=case.lr, weight_decay=case.weight_decay)
    return torch.optim.SGD(
        parameters, lr=case.lr, momentum=case.momentum, nesterov=case.nesterov, weight_decay=case.weight_decay
    )


def flat(tensors: Any) -> Array:
    """Tensors as one NumPy vector."""
    return np.concatenate([t.detach().double().numpy().reshape(-1) for t in tensors])


def backwards(model: torch.nn.Module) -> list[torch.Tensor]:
    """The parameters as they lie in buckets: the last first."""
    return list(model.parameters())[::-1]


def apply_plainly(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], gradient: Array) -> None:
    """A step of a plain optimizer with a flat gradient."""
    parts = torch.as_tensor(gradient, dtype=torch.float32).split([p.numel() for p in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter).clone()
    optimizer.step()


def _made(case: Any, parameters: Any) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = plain(case, parameters) if isinstance(case, Case) else case(parameters)
    return made


class _Rank:
    """The part that a rank with a model and one with given gradients share."""

    opt: Any
    parameters: list[torch.Tensor]
    """In the order in which they lie in vectors."""

    def weights(self) -> Array:
        """Flat, in the optimizer's order."""
        return flat(self.parameters)

    def state(self) -> list[list[float]]:
        """Return for each parameter its weights and the optimizer's state."""
        held = [self.opt.state.get(p, {}).values() for p in self.parameters]
        return [
            [x for t in (p, *(v for v in own if torch.is_tensor(v))) for x in t.detach().double().reshape(-1).tolist()]
            for p, own in zip(self.parameters, held, strict=True)
        ]

    def saved(self) -> Any:
        """Return what a checkpoint holds."""
        return [p.detach().clone() for p in self.parameters], copy.deepcopy(self.opt.state_dict())

    def set_rate(self, rate: float) -> None:
        """Set the learning rate."""
        self.opt.param_groups[0]["lr"] = rate

    def rate(self) -> float:
        """Its learning rate now."""
        return float(self.opt.param_groups[0]["lr"])

    def assign(self, index: int, value: Any) -> None:
        """Write a parameter."""
        with torch.no_grad():
            self.parameters[index].copy_(torch.as_tensor(value))

    def load(self, saved: Any) -> None:
        """Be as the rank that was saved."""
        weights, state = saved
        with torch.no_grad():
            for parameter, values in zip(self.parameters, weights, strict=True):
                parameter.copy_(values)
        torchs = copy.deepcopy({name: part for name, part in state.items() if name != "hvd_async"})
        self.opt.load_state_dict({**state, **torchs})  # (torch keeps the tensors it is given; ours may be loaded again)


class TorchTrainer(_Rank):
    """One rank.

    Args:
        case: its optimizer, or a function that makes it for the parameters.
    """

    def __init__(self, case: Any, **options: Any) -> None:
        self.model = conv_model()
        self.parameters = backwards(self.model)
        options.setdefault("named_parameters", self.model.named_parameters())
        self.opt = hvd.EagerOptimizer(_made(case, self.model.parameters()), **{"quorum": "solo", **options})

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


class TorchVectors(_Rank):
    """A rank whose gradients are given: some vectors, each a parameter.

    Args:
        sizes: of the vectors.
        case: their optimizer, or a function that makes it for them.
        start: what they are filled with.
        dtypes: theirs; all of float32 if none are given.
        early: whether hooks hand over during backward, since ``opt.zero_grad()`` has cleared the gradients.

    Attributes:
        samples: to be recorded for each backward pass; None if nothing is.
    """

    samples: int | None = None

    def __init__(
        self,
        sizes: Sequence[int],
        case: Any,
        start: float = 0.0,
        dtypes: Sequence[str] = (),
        early: bool = True,
        **options: Any,
    ) -> None:
        self._early = early
        kinds = [getattr(torch, dtype) for dtype in dtypes] or [torch.float32] * len(sizes)
        filled = [torch.full((n,), start, dtype=d) for n, d in zip(sizes, kinds, strict=True)]
        self.parameters = [torch.nn.Parameter(one) for one in filled]
        if callable(options.get("groups")):
            options["groups"] = options["groups"](self.parameters)
        self.opt = hvd.EagerOptimizer(_made(case, self.parameters), **{"quorum": "solo", **options})

    def freeze(self, index: int, frozen: bool = True) -> None:
        """A vector has no gradient from now on, or has again."""
        self.parameters[index].requires_grad_(not frozen)

    def take(self, *gradients: Any) -> None:
        """A step with one gradient each: numbers, or None for none."""
        self.take_passes([gradients])

    def take_passes(self, passes: Sequence[Sequence[Any]]) -> None:
        """A step of several backward passes."""
        self.backward(passes)
        self.opt.step()

    def backward(self, passes: Sequence[Sequence[Any]]) -> None:
        """A step except for ``step()``."""
        if self._early:
            self.opt.zero_grad()
        for parameter in self.parameters:
            parameter.grad = None
        for gradients in passes:
            pairs = zip(self.parameters, gradients, strict=True)
            given = [(p, torch.as_tensor(g, dtype=p.dtype)) for p, g in pairs if g is not None]
            if self.samples is not None:
                self.opt.record_samples(self.samples)
            sum((p * g).sum() for p, g in given).backward()  # type: ignore[union-attr]


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
        wrapped = hvd.EagerOptimizer(optimizer, **{"quorum": "solo", **options})
    elements = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    attach(wrapped, ScriptedWorker(script, size, elements, optimizer.param_groups[0]["lr"], torch.as_tensor))
    return wrapped


def quadratic(*values: float) -> torch.nn.Parameter:
    """A parameter of its own, with gradient 1."""
    parameter = torch.nn.Parameter(torch.tensor(values))
    parameter.grad = torch.ones_like(parameter)
    return parameter
