"""Torch tensors as bytes and as vectors; buffers of modules by name."""

from __future__ import annotations

import contextlib
import inspect
import io
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
import torch

from hvd_async.optimizers import agreement
from hvd_async.optimizers.agreement import Array, Buffers, unique_keys
from hvd_async.runtime.worker import Worker

# -- buffers -----------------------------------------------------------------------------------------------------------


Pairs: TypeAlias = Iterable[tuple[str, torch.Tensor]]
"""Names and buffers, from ``model.named_buffers()`` for example."""
STATISTICS = ("running_mean", "running_var")
"""Names of the running statistics in torch's batch norm and its imitations."""


class NamedBuffers:
    """The buffers of a model, listed again each time: a module may put another tensor in a buffer's place.

    Args:
        given: ``named_buffers`` as the user gave it: a model, a function that returns pairs (name, tensor), or the
            unused result of a model's ``named_buffers()``, which is called again. Other pairs are taken as they are.

    Raises:
        ValueError: ``given`` is something else.
    """

    def __init__(self, given: Pairs | Callable[[], Pairs] | torch.nn.Module | None) -> None:
        self._list: Callable[[], Pairs] | None = None
        if given is None:
            return
        if isinstance(given, torch.nn.Module):
            self._list = given.named_buffers
        elif callable(given):
            self._list = given
        elif (
            inspect.isgenerator(given)
            and given.gi_code is torch.nn.Module.named_buffers.__code__
            and inspect.getgeneratorstate(given) == inspect.GEN_CREATED
        ):  # (then its variables are the arguments of the call)
            self._list = partial(torch.nn.Module.named_buffers, **inspect.getgeneratorlocals(given))
        else:
            pairs = _checked(given)
            self._list = lambda: pairs

    def __bool__(self) -> bool:
        """Return whether any were given."""
        return self._list is not None

    def now(self) -> list[tuple[str, torch.Tensor]]:
        """Return names and tensors; a lazy module's that are not known yet, and empty ones, are left out."""
        pairs = [] if self._list is None else _checked(self._list())
        return [(n, t) for n, t in pairs if not torch.nn.parameter.is_lazy(t) and t.numel()]

    def buffers(self) -> Buffers | None:
        """Return all buffers, for ``unify_buffers``; None if none were given."""
        if self._list is None:
            return None
        named = self.now()
        keys = unique_keys(name for name, _ in named)
        return Buffers([TorchBuffer(key, *pair) for key, pair in zip(keys, named, strict=True)], torch.from_numpy)


def is_statistic(name: str, tensor: torch.Tensor) -> bool:
    """Return whether a buffer is a running mean or variance of batch norm."""
    return name.rpartition(".")[2] in STATISTICS and tensor.is_floating_point() and is_plain(tensor)


class TorchBuffer(agreement.Buffer):
    """A buffer of a torch module on one rank."""

    def __init__(self, key: str, name: str, tensor: torch.Tensor) -> None:
        self.key, self.name, self._tensor = key, name, tensor
        self.is_statistic, self.is_writable = is_statistic(name, tensor), is_plain(tensor)
        self.kind = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"

    def data(self) -> Array:
        if self.is_writable:
            return bytes_of(self._tensor).cpu().numpy()
        file = io.BytesIO()
        torch.save(self._tensor.detach(), file)
        return np.frombuffer(file.getvalue(), np.uint8)

    def put_data(self, data: Array) -> None:
        write(self._tensor, from_bytes(torch.from_numpy(data), self._tensor))

    def values(self) -> Array:
        return self._tensor.detach().double().reshape(-1).cpu().numpy().copy()

    def put_values(self, values: Array) -> None:
        write(self._tensor, torch.from_numpy(values).view(self._tensor.shape))


# -- tensors of any dtype -----------------------------------------------------------------------------------------


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements are its bytes: it is neither sparse nor quantized, and has a memory."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a strided tensor as bytes, shape (n,), uint8, a new tensor on its device."""
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return plain.reshape(-1).view(torch.uint8)


def from_bytes(data: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the tensor whose ``bytes_of`` is ``data``, with the shape and dtype of ``like``."""
    return data.clone().view(like.dtype).view(like.shape)


def write(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a value into a tensor of its shape; elements of an expanded tensor that share memory get the first."""
    in_mode = torch.inference_mode() if tensor.is_inference() else contextlib.nullcontext()
    with torch.no_grad(), in_mode:
        for dim, size in enumerate(tensor.shape if is_plain(tensor) else ()):
            if size > 1 and tensor.stride(dim) == 0:
                tensor, value = tensor.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
        tensor.copy_(value)


def _checked(given: Pairs) -> list[tuple[str, torch.Tensor]]:
    pairs = list(given) if isinstance(given, Iterable) else [given]
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ValueError(
            f"named_buffers must be pairs (name, tensor), or a function that returns them, got {pairs[:1]!r}. Pass "
            f"model.named_buffers"
        )
    return pairs


# -- tensors as one vector, and descriptions of them -------------------------------------------------------------------


def checksum(tensor: torch.Tensor) -> int:
    """Return the CRC-32 of a tensor's bytes."""
    return zlib.crc32(bytes_of(tensor).cpu().numpy().data)


def signature(name: str, tensor: torch.Tensor) -> str:
    """Return name, shape and dtype in one string, for comparison over ranks."""
    return f"{name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def take_over(worker: Worker, tensors: Sequence[torch.Tensor], rank: int) -> None:
    """Overwrite tensors with those of ``rank``, bit by bit. A collective."""
    parts = [bytes_of(tensor).cpu() for tensor in tensors]
    received = torch.as_tensor(worker.broadcast(torch.cat(parts), rank, "the repair of replicas"))
    for tensor, data in zip(tensors, received.split([len(part) for part in parts]), strict=True):
        write(tensor, from_bytes(data, tensor))


def flat_double(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return parameters as one new vector, shape (n,), float64."""
    return torch.cat([p.detach().reshape(-1).double() for p in parameters])
