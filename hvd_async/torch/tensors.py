"""Torch tensors as bytes and as vectors; buffers of modules, found by name where the modules hold them now."""

from __future__ import annotations

import contextlib
import gc
import inspect
import io
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

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
    """The buffers of a model, looked up each time: a module may put another tensor in a buffer's place.

    Args:
        given: ``named_buffers`` as the user gave it: pairs (name, tensor), or a function that returns them, which is
            called each time. The modules that hold the tensors of pairs are found at construction, so that their
            buffers are looked up too: in the model whose ``named_buffers()`` it is, else among all objects, which takes
            about 0.4 s per million of them. A tensor that no module holds is used as it is.

    Raises:
        ValueError: ``given`` is something else.
    """

    def __init__(self, given: Pairs | Callable[[], Pairs] | None) -> None:
        self._list: Callable[[], Pairs] | None = None
        self._found: list[tuple[str, _Place]] = []
        if isinstance(given, torch.nn.Module):
            self._list = given.named_buffers
        elif callable(given):
            self._list = given
        else:
            model = inspect.getgeneratorlocals(given).get("self") if inspect.isgenerator(given) else None
            pairs = _checked(given or [])
            owners = _owners(pairs, model if isinstance(model, torch.nn.Module) else None)
            self._found = [(name, owners.get(id(tensor)) or _Place({name: tensor}, name)) for name, tensor in pairs]

    def __bool__(self) -> bool:
        """Return whether there may be any."""
        return self._list is not None or bool(self._found)

    def now(self) -> list[tuple[str, torch.Tensor]]:
        """Return names and tensors; a lazy module's that are not known yet, and empty ones, are left out."""
        if self._list is not None:
            pairs: list[tuple[str, torch.Tensor | None]] = list(_checked(self._list()))
        else:
            pairs = [(name, tensor) for (name, _), tensor in zip(self._found, self._tensors(), strict=True)]
        return [(n, t) for n, t in pairs if t is not None and not torch.nn.parameter.is_lazy(t) and t.numel()]

    def statistics(self) -> dict[str, torch.Tensor]:
        """Return the running statistics of batch norm by key."""
        named = self.now()
        keys = unique_keys(name for name, _ in named)
        return {key: tensor for key, (name, tensor) in zip(keys, named, strict=True) if is_statistic(name, tensor)}

    def reader(self, keys: Sequence[str]) -> Callable[[], list[torch.Tensor | None]]:
        """Return a function that returns the tensors now under these keys of ``statistics()``, or their replacements at
        the time of the call; None for a buffer that is gone. It is made once and called in each step."""
        if self._list is not None:
            return lambda: [*map(self.statistics().get, keys)]
        by_tensor = {id(tensor): place for (_, place), tensor in zip(self._found, self._tensors(), strict=True)}
        held = self.statistics()
        return partial(_now, [by_tensor[id(held[key])] for key in keys])

    def _tensors(self) -> list[torch.Tensor | None]:
        return _now([place for _, place in self._found])

    def buffers(self) -> Buffers | None:
        """Return all buffers, for ``unify_buffers``; None if none were given."""
        if not self:
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


# -- the modules that hold given tensors --------------------------------------------------------------------------


def _checked(given: Pairs) -> list[tuple[str, torch.Tensor]]:
    pairs = list(given) if isinstance(given, Iterable) else [given]
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ValueError(
            f"named_buffers must be pairs (name, tensor), or a function that returns them, got {pairs[:1]!r}. Pass "
            f"model.named_buffers"
        )
    return pairs


class _Place(NamedTuple):
    """The location of a buffer: a module's ``_buffers``, or a dictionary with only this buffer, and its name there."""

    buffers: dict[str, torch.Tensor | None]
    name: str


def _now(places: Sequence[_Place]) -> list[torch.Tensor | None]:
    """Return the tensor in each place now, or None. (Leaders call this in each step, so it is one loop.)"""
    return [buffers.get(name) for buffers, name in places]


def _owners(pairs: Sequence[tuple[str, torch.Tensor]], model: torch.nn.Module | None) -> dict[int, _Place]:
    """Return, by the ids of tensors, the places where modules hold them: those of the model, if it has all of them.

    (Pairs do not name their modules. If several modules hold a tensor, one that has it by this name is taken.)
    """
    last_parts = {id(tensor): name.rpartition(".")[2] for name, tensor in pairs}

    def places(dicts: Iterable[dict[str, torch.Tensor | None]]) -> dict[int, _Place]:
        found: dict[int, _Place] = {}
        for buffers in dicts:
            for name, tensor in buffers.items():
                key = id(tensor)
                if key in last_parts and (key not in found or last_parts[key] == name):
                    found[key] = _Place(buffers, name)
        return found

    # (TorchScript's modules have no dictionary)
    held = [] if model is None else [one._buffers for one in model.modules() if isinstance(one._buffers, dict)]
    in_model = places(held)
    return in_model if len(in_model) == len(last_parts) else places(_dicts_of_buffers([tensor for _, tensor in pairs]))


def _dicts_of_buffers(tensors: Sequence[torch.Tensor]) -> list[dict[str, torch.Tensor | None]]:
    """Return ``_buffers`` of all modules that hold any of these tensors.

    (Not by ``gc.get_objects``, whose list holds all objects: filling a new tuple fails with a SystemError in another
    thread while a reference to it is held elsewhere.)
    """
    dicts = [one for one in gc.get_referrers(*tensors) if isinstance(one, dict)] if tensors else []
    owners = gc.get_referrers(*dicts) if dicts else []
    attributes = [vars(one) if isinstance(one, torch.nn.Module) else one for one in owners]
    in_modules = {id(one.get("_buffers")) for one in attributes if isinstance(one, dict)}
    return [one for one in dicts if id(one) in in_modules]


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
