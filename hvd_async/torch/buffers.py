"""Of torch tensors: checksums, batch-norm buffers that agree, the distance of replicas."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from hvd_async.engine import Engine
from hvd_async.sharers import Sharers


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of the tensor's bytes."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else 0


def signature(name: str, tensor: torch.Tensor) -> str:
    """Name, shape and dtype in one string, for comparison over ranks."""
    return f"{name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


@torch.no_grad()
def unify_buffers(
    engine: Engine, named: Iterable[tuple[str, torch.Tensor]], policy: str, sharers: Sharers, root: int
) -> None:
    """Make batch-norm statistics agree on all ranks.

    ``average`` over the ranks whose own are finite, counters from rank ``root``; or ``root``, all from that one.
    A collective: every rank of the sharers calls it, at the same point.
    """
    tensors = [tensor for _, tensor in named if tensor.numel()]
    floating = [t for t in tensors if t.is_floating_point() and policy == "average"]
    for kind, group in _by_kind(floating):
        flat = torch.cat([*(t.reshape(-1) for t in group), group[0].new_ones(1)])
        if not torch.isfinite(flat).all():
            flat.zero_()  # a rank whose batch held NaN has nothing to say; the last element counts those that have
        total = torch.as_tensor(engine.sum(flat, f"hvd_async.buffers.average.{sharers.id}.{kind}", sharers.process_set))
        if total[-1] > 0:
            _scatter(total[:-1] / total[-1], group)
    for kind, group in _by_kind([t for t in tensors if policy == "root" or not t.is_floating_point()]):
        flat = torch.cat([t.reshape(-1) for t in group])
        name = f"hvd_async.buffers.root.{sharers.id}.{kind}"
        _scatter(engine.broadcast(flat, root, name, sharers.process_set), group)


def _by_kind(tensors: list[torch.Tensor]) -> Iterator[tuple[str, list[torch.Tensor]]]:
    kinds: dict[str, list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(f"{tensor.device.type}.{tensor.dtype}", []).append(tensor)
    yield from sorted(kinds.items())


def _scatter(flat: Any, tensors: list[torch.Tensor]) -> None:
    flat = torch.as_tensor(flat)
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


@torch.no_grad()
def consensus_distance(engine: Engine, parameters: Sequence[torch.Tensor], sharers: Sharers) -> float:
    """sqrt(mean over ranks of |x_i - mean x|^2), x_i rank i's weights; 0 if all are equal. A collective."""
    where = f"hvd_async.consensus.{sharers.id}"
    flat = torch.cat([p.detach().reshape(-1).double() for p in parameters])
    mean = engine.sum(flat.clone(), f"{where}.mean", sharers.process_set) / sharers.size
    square = torch.sum((flat - torch.as_tensor(mean)) ** 2).reshape(1)
    total = engine.sum(square, f"{where}.square", sharers.process_set)
    return float(total[0] / sharers.size) ** 0.5
