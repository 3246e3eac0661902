"""Checksums of torch tensors, batch-norm buffers that agree, the distance of replicas."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from hvd_async.runtime.worker import Worker


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of the tensor's bytes."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else 0


def signature(name: str, tensor: torch.Tensor) -> str:
    """Name, shape and dtype in one string, for comparison over ranks."""
    return f"{name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


@torch.no_grad()
def unify_buffers(worker: Worker, named: Iterable[tuple[str, torch.Tensor]], policy: str, root: int) -> None:
    """Make batch-norm statistics agree on all ranks.

    ``average`` over the ranks whose own are finite, counters from rank ``root``; or ``root``, all from that one.
    A collective: every rank that still has the optimizer calls it, at the same point.
    """
    tensors = [tensor for _, tensor in named if tensor.numel()]
    floating = [t for t in tensors if t.is_floating_point() and policy == "average"]
    for kind, group in _by_kind(floating):
        flat = torch.cat([*(t.reshape(-1) for t in group), group[0].new_ones(1)])
        if not torch.isfinite(flat).all():
            flat.zero_()  # a rank whose batch held NaN has nothing to say; the last element counts those that have
        total = torch.as_tensor(worker.sum(flat, f"the average of buffers ({kind})").vector)
        if total[-1] > 0:
            _scatter(total[:-1] / total[-1], group)
    for kind, group in _by_kind([t for t in tensors if policy == "root" or not t.is_floating_point()]):
        flat = torch.cat([t.reshape(-1) for t in group])
        _scatter(worker.broadcast(flat, root, f"the broadcast of buffers ({kind})"), group)


@torch.no_grad()
def take_over(worker: Worker, tensors: Sequence[torch.Tensor], rank: int) -> None:
    """Give every rank the bits of ``rank``'s tensors. A collective."""
    for kind, group in _by_kind([tensor for tensor in tensors if tensor.numel()]):
        flat = torch.cat([t.reshape(-1) for t in group])
        brought = torch.as_tensor(worker.broadcast(flat.view(torch.uint8), rank, f"the mending of replicas ({kind})"))
        _scatter(brought.view(flat.dtype), group)


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
def consensus_distance(worker: Worker, parameters: Sequence[torch.Tensor]) -> float:
    """sqrt(mean over ranks of |x_i - mean x|^2), x_i rank i's weights; 0 if all are equal. A collective."""
    flat = torch.cat([p.detach().reshape(-1).double() for p in parameters])
    total, ranks, _ = worker.sum(flat.clone(), "consensus_distance()")
    mean = torch.as_tensor(total) / len(ranks)
    square = torch.sum((flat - mean) ** 2).reshape(1)
    total, ranks, _ = worker.sum(square, "consensus_distance()")
    return float(total[0] / len(ranks)) ** 0.5
