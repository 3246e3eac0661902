"""torch parameters and flat vectors: gradients out, rounds in, checksums, batch-norm buffers, distance of replicas."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from hvd_async.engine import Engine


class Layout:
    """Where each parameter lies in the buckets: one bucket for each (device, accumulation dtype).

    Half-precision gradients accumulate and travel as float32; a bucket's last element counts gradients.

    Args:
        parameters: in the same order on all ranks.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = list(parameters)
        self._buckets: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for parameter in parameters:
            if not parameter.is_floating_point():
                raise ValueError(
                    f"a parameter of dtype {parameter.dtype} cannot be averaged: keep it out of the optimizer"
                )
            dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
            self._buckets.setdefault((parameter.device, dtype), []).append(parameter)

    def __len__(self) -> int:
        return len(self._buckets)

    def zeros(self, bucket: int) -> torch.Tensor:
        """A vector of bucket ``bucket`` that holds no gradient."""
        (device, dtype), parameters = list(self._buckets.items())[bucket]
        return torch.zeros(sum(p.numel() for p in parameters) + 1, device=device, dtype=dtype)

    @torch.no_grad()
    def gradients(self, sparse_as_dense: bool) -> list[torch.Tensor]:
        """Every bucket's ``p.grad``, copied once; a parameter without gradient counts as zero, as in Horovod.

        Raises:
            ValueError: a gradient is sparse and ``sparse_as_dense`` is not set.
        """
        vectors = []
        for (device, dtype), parameters in self._buckets.items():
            parts = [self._gradient(p, sparse_as_dense).reshape(-1).to(dtype) for p in parameters]
            vectors.append(torch.cat([*parts, torch.ones(1, device=device, dtype=dtype)]))
        return vectors

    @staticmethod
    def _gradient(parameter: torch.Tensor, sparse_as_dense: bool) -> torch.Tensor:
        gradient = parameter.grad
        if gradient is None:
            return torch.zeros_like(parameter)
        if gradient.is_sparse:
            if not sparse_as_dense:
                raise ValueError("a gradient is sparse: pass sparse_as_dense=True to send it as a dense tensor")
            return gradient.to_dense()
        return gradient

    @torch.no_grad()
    def set_gradients(self, sums: Sequence[torch.Tensor], scale: float, trainable: Sequence[bool]) -> None:
        """Point trainable parameters' ``p.grad`` into ``sums`` x ``scale`` (done in place), the others' to None."""
        moves = {id(p) for p, flag in zip(self._parameters, trainable, strict=True) if flag}
        for vector, parameters in zip(sums, self._buckets.values(), strict=True):
            average = vector[:-1].mul_(scale)
            for parameter, part in zip(parameters, average.split([p.numel() for p in parameters]), strict=True):
                view = part.view_as(parameter).to(parameter.dtype)
                parameter.grad = view if id(parameter) in moves else None


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of the tensor's bytes."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else 0


def signature(name: str, tensor: torch.Tensor) -> str:
    """Name, shape and dtype in one string, for comparison over ranks."""
    return f"{name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


@torch.no_grad()
def unify_buffers(engine: Engine, named: Iterable[tuple[str, torch.Tensor]], policy: str) -> None:
    """Make batch-norm statistics agree on all ranks: ``average`` (counters from rank 0) or ``root`` (all from rank 0).

    A collective: every rank calls it, at the same point.
    """
    tensors = [tensor for _, tensor in named if tensor.numel()]
    floating = [t for t in tensors if t.is_floating_point() and policy == "average"]
    for kind, group in _by_kind(floating):
        flat = torch.cat([t.reshape(-1) for t in group])
        total = engine.sum(flat, f"hvd_async.buffers.average.{kind}")
        _scatter(total / engine.size, group)
    for kind, group in _by_kind([t for t in tensors if policy == "root" or not t.is_floating_point()]):
        flat = torch.cat([t.reshape(-1) for t in group])
        _scatter(engine.broadcast(flat, 0, f"hvd_async.buffers.root.{kind}"), group)


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
def consensus_distance(engine: Engine, parameters: Sequence[torch.Tensor]) -> float:
    """sqrt(mean over ranks of |x_i - mean x|^2), x_i rank i's weights; 0 if all are equal. A collective."""
    flat = torch.cat([p.detach().reshape(-1).double() for p in parameters])
    mean = engine.sum(flat.clone(), "hvd_async.consensus.mean") / engine.size
    square = torch.sum((flat - torch.as_tensor(mean)) ** 2).reshape(1)
    total = engine.sum(square, "hvd_async.consensus.square")
    return float(total[0] / engine.size) ** 0.5
