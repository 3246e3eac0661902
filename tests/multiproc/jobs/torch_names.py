"""The names of ``hvd_async.torch`` that are ours, and wrong use of it: the part of ``names.py`` that only torch has."""

from __future__ import annotations

from typing import Any

import torch
from common import Report, raised
from table import BROADCASTS
from torch_common import Batches, crc, mlp, state_tensors

import hvd_async.torch as hvd


def different_weights(report: Report) -> None:
    """Refused on every rank; broadcasting and wrapping again fixes it."""
    model, batches = mlp(seed=hvd.rank()), Batches(hvd.rank())
    optimizer = hvd.EagerOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    batches.backward(model)
    error = raised(optimizer.step)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.EagerOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    batches.backward(model)
    optimizer.step()
    optimizer.drain()
    report.put("different weights", **error, weights=crc(model.parameters()))


def broadcast_state(report: Report, kind: str, steps: tuple[int, int]) -> None:
    """Rank r has taken ``steps[r]`` steps with the plain optimizer, on its own data."""
    model, batches = mlp(seed=4), Batches(hvd.rank())
    plain: torch.optim.Optimizer = (
        torch.optim.Adam(model.parameters(), lr=0.01 * (1 + hvd.rank()))
        if kind == "adam"
        else torch.optim.SGD(model.parameters(), lr=0.01 * (1 + hvd.rank()), momentum=0.9)
    )
    for _ in range(steps[hvd.rank()]):
        batches.backward(model)
        plain.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    before = crc(model.parameters())
    optimizer = hvd.EagerOptimizer(plain, model.named_parameters(), quorum="all")
    own = crc(state_tensors(optimizer))
    if hvd.rank() == 0:  # as resumed from a checkpoint that the others do not have
        state = optimizer.state_dict()
        state["hvd_async"]["rounds"] = 7
        optimizer.load_state_dict(state)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    result = {
        "moved": crc(model.parameters()) != before,
        "own": own,
        "state": crc(state_tensors(optimizer)),
        "entries": len(state_tensors(optimizer)),
        "lr": optimizer.param_groups[0]["lr"],
        "parameters": len(list(model.parameters())),
    }
    for _ in range(2):
        batches.backward(model)
        optimizer.step()
    optimizer.drain()
    result["rounds"] = optimizer.rounds
    result.update(steps=optimizer.stats().steps, weights=crc(model.parameters()), trained=crc(state_tensors(optimizer)))
    report.put(f"broadcast {kind} {steps[0]} {steps[1]}", **result)


def broadcast_channels_last(report: Report) -> None:
    """Momentum lies in memory as its weights do, which Horovod does not take."""
    model = torch.nn.Conv2d(3, 4, 2)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    model = model.to(memory_format=torch.channels_last)
    plain = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    if hvd.rank() == 0:
        model(torch.randn(2, 3, 5, 5)).square().mean().backward()
        plain.step()
    optimizer = hvd.EagerOptimizer(plain, model.named_parameters())
    last = sum(not tensor.is_contiguous() for tensor in state_tensors(optimizer))
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    report.put("broadcast channels last", last=last, state=crc(state_tensors(optimizer)))


class AnyKind(torch.nn.Module):
    """A module in bfloat16 with buffers of many kinds and an extra state, other ones on each rank."""

    def __init__(self, own: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((3,), 0.5 + own).bfloat16())
        kinds = ("bool", "bfloat16", "complex64", "uint16", "float8_e4m3fn", "float64", "int64")
        for kind in kinds:
            self.register_buffer(f"of_{kind}", torch.tensor([own, 1 - own]).to(getattr(torch, kind)))
        self.register_buffer("expanded", torch.full((1,), 1.0 + own).expand(4))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("number", torch.tensor(own == 0))
        self.scale = f"scale {own}"

    def get_extra_state(self) -> Any:
        return {"scale": self.scale}

    def set_extra_state(self, state: Any) -> None:
        self.scale = state["scale"]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (self.weight * inputs).sum()

    def values(self) -> list[Any]:
        return [
            self.weight.tolist(),
            *([str(x) for x in buffer.tolist()] if buffer.dim() else str(buffer.item()) for buffer in self.buffers()),
        ]


def any_kind(report: Report) -> None:
    """Ranks take tensors of every dtype from rank 0: by name, and in an elastic job's ``sync()``."""
    rank = hvd.rank()

    def made() -> tuple[AnyKind, Any]:
        module = AnyKind(rank)
        plain = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        if rank == 0:
            module(torch.ones(3)).backward()
            plain.step()
            plain.state[module.weight]["seen"] = torch.tensor([True, False])
        return module, plain

    module, plain = made()
    hvd.broadcast_parameters(module.state_dict(), root_rank=0)
    optimizer = hvd.EagerOptimizer(plain, module.named_parameters(), named_buffers=module.named_buffers(), quorum="all")
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    state = {key: value.tolist() for key, value in optimizer.state[module.weight].items()}
    module(torch.ones(3)).backward()
    optimizer.step()
    optimizer.drain()
    result: dict[str, Any] = {"values": module.values(), "state": state, "kept": module.scale}
    module, plain = made()
    optimizer = hvd.EagerOptimizer(plain, module.named_parameters(), quorum="all")
    hvd.elastic.TorchState(model=module, optimizer=optimizer).sync()
    result["joined"] = module.values()
    result["state joined"] = {key: value.tolist() for key, value in optimizer.state[module.weight].items()}
    report.put("any kind", **result, scale=module.scale, expected=AnyKind(0).values()[1:])


def run(report: Report) -> None:
    """All cases."""
    different_weights(report)
    for kind, steps in BROADCASTS:
        broadcast_state(report, kind, steps)
    broadcast_channels_last(report)
    any_kind(report)
