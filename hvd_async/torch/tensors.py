"""Torch tensors as one vector and back; their checksums and signatures."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
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


@torch.no_grad()
def _scatter(flat: Any, tensors: list[torch.Tensor]) -> None:
    flat = torch.as_tensor(flat)
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def flat_double(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return parameters as one new vector, shape (n,), float64."""
    return torch.cat([p.detach().reshape(-1).double() for p in parameters])
