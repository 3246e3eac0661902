"""``EagerOptimizer(quorum="all")`` next to Horovod's ``DistributedOptimizer``, from the same seeds, in one job."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from common import Part, Report
from table import Equality, equalities
from torch_common import DEVICE, crc

import hvd_async.torch as hvd
from hvd_async.torch import horovod_api

STEPS = 30
OPTIMIZERS: dict[str, Callable[[Any, float], torch.optim.Optimizer]] = {
    "sgd": lambda parameters, factor: torch.optim.SGD(parameters, lr=0.05 * factor, momentum=0.9, weight_decay=1e-4),
    "adam": lambda parameters, factor: torch.optim.Adam(parameters, lr=1e-3 * factor),
}
COMPRESSION = {"fp16": hvd.Compression.fp16, "bf16": hvd.Compression.bf16, "none": hvd.Compression.none}


def network() -> torch.nn.Module:
    """Two convolutions with batch norm, for 1 x 8 x 8 images."""
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3, padding=1, bias=False),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(),
        torch.nn.Conv2d(4, 8, 3, stride=2, bias=False),  # a bias before batch norm: gradients of pure rounding
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(72, 10),
    )


def options_of(given: dict[str, Any]) -> dict[str, Any]:
    """Keywords from what the table can hold."""
    made = dict(given)
    if "compression" in made:
        made["compression"] = COMPRESSION[made["compression"]]
    if "op" in made:
        made["op"] = getattr(hvd, made["op"])
    return made


def train(
    case: Equality, wrap: Callable[..., Any], options: dict[str, Any], device: torch.device
) -> tuple[torch.nn.Module, Any, int]:
    """30 steps on this rank's own data; also how many buckets left before ``step()``."""
    model = network().to(device)
    # (a sum over the ranks with an average's rate grows differences in the last bits until they show)
    factor = 1.0 / hvd.size() if options.get("op") == "Sum" else 1.0
    optimizer = wrap(
        OPTIMIZERS[case.optimizer](model.parameters(), factor), model.named_parameters(), **options_of(options)
    )
    early = 0
    if isinstance(getattr(optimizer, "rounds", None), int):
        worker = optimizer._async.worker_now()
        hand_over = worker.hand_over

        def spy(bucket: int, vector: Any) -> None:
            nonlocal early
            early += 1
            hand_over(bucket, vector)

        worker.hand_over = spy
    generator = torch.Generator().manual_seed(100 + hvd.rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(case.passes):
            x = torch.randn(16, 1, 8, 8, generator=generator)
            y = torch.randint(0, 10, (16,), generator=generator)
            torch.nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
        optimizer.step()
    return model, optimizer, early


class Averaged(torch.optim.Optimizer):
    """What Horovod's optimizer does, step by step, where there is no Horovod: averages of gradients, then a step."""

    def __init__(self, optimizer: torch.optim.Optimizer, named_parameters: Any, **options: Any) -> None:
        self._inner = optimizer
        self._op = options.get("op", hvd.Average)
        self._compression = options.get("compression", hvd.Compression.none)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._inner.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        for group in self._inner.param_groups:
            for parameter in group["params"]:
                parameter.grad = hvd.allreduce(parameter.grad, op=self._op, compression=self._compression)
        return self._inner.step(closure)


DistributedOptimizer = hvd.DistributedOptimizer if horovod_api.hvd.on_horovod else Averaged


def farthest(one: Any, other: Any) -> float:
    """The largest difference between two lists of tensors."""
    return max(float((a.cpu() - b.cpu()).abs().max().detach()) for a, b in zip(one, other, strict=True))


def run(_: Any, report: Report, part: Part) -> None:
    """All cases, or a few."""
    for case in equalities(part.share):
        # (a Horovod built with NCCL cannot stage tensors on the CPU)
        place = torch.device("cpu") if os.environ["HVD_ASYNC_STAGE"] == "1" else DEVICE
        theirs, _, _ = train(case, DistributedOptimizer, case.theirs, place)
        ours, optimizer, early = train(case, hvd.EagerOptimizer, {**case.ours, "quorum": "all"}, DEVICE)
        optimizer.drain()
        report.put(
            case.name,
            difference=farthest(theirs.parameters(), ours.parameters()),
            buffers=farthest(theirs.buffers(), ours.buffers()),
            moved=farthest(network().parameters(), ours.parameters()),
            weights=crc(ours.parameters()),
            rounds=optimizer.stats().rounds_applied,
            early=early,
            buckets=len(optimizer._async.replica.layout),
            sent=optimizer.stats().bytes_sent / optimizer.stats().rounds,
        )
