"""Names of ``horovod.torch`` that would break or mislead beside our optimizers, made right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hvd_async.algorithms.eager import timeline
from hvd_async.optimizers import elastic
from hvd_async.optimizers.methods import OptimizerMethods
from hvd_async.torch.buffers import bytes_of, from_bytes, is_plain, write
from hvd_async.torch.collectives import LIFECYCLE
from hvd_async.torch.horovod_api import horovods_broadcast, hvd
from hvd_async.torch.inference import outside_inference_mode

timeline.watch_exit(hvd.shutdown)


class _Shape(tuple[Any, ...]):
    """Stands for a tensor in a structure that is sent ahead of it: (shape, dtype)."""


HOROVODS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64}
"""Dtypes that Horovod broadcasts."""


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Give every rank the tensors of ``root_rank``, in place; unlike Horovod's, of every dtype, and expanded ones too.

    Args:
        params: ``model.state_dict()``, or a list of tensors or of pairs (name, tensor); the same names on all ranks.
            Entries that are no tensors (a module's extra state) and sparse or quantized tensors stay each rank's own.
        root_rank: whose tensors to send.

    Raises:
        ValueError: ``params`` is something else.
    """
    if isinstance(params, dict):
        pairs: list[tuple[str | None, Any]] = sorted(params.items())
    elif isinstance(params, list):
        pairs = [one if isinstance(one, tuple) else (None, one) for one in params]
    else:
        raise ValueError(f"params must be a dict or a list, got {type(params).__name__}. Pass model.state_dict()")
    begun: list[tuple[int, torch.Tensor, torch.Tensor | None]] = []
    for name, tensor in pairs:
        if not isinstance(tensor, torch.Tensor) or not is_plain(tensor):
            continue
        data = None if tensor.dtype in HOROVODS and tensor.is_contiguous() else bytes_of(tensor)
        begun.append((hvd.broadcast_async_(tensor if data is None else data, root_rank, name), tensor, data))
    for handle, tensor, data in begun:
        hvd.synchronize(handle)
        if data is not None:
            write(tensor, from_bytes(data, tensor))


@outside_inference_mode
def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0, model: Any = None) -> None:
    """Give every rank the optimizer state of ``root_rank``.

    Horovod's own creates missing state by calling ``step()``, which would fire a round here; this one sends the state
    as it is, so it may be called before the first step, by all ranks.

    Args:
        optimizer: one of ours, or any torch optimizer (then Horovod's function is called).
        root_rank: whose state to send.
        model: as in Horovod; not needed.
    """
    if not isinstance(optimizer, OptimizerMethods):
        horovods_broadcast(optimizer, root_rank, model)
        return
    if optimizer._async.worker is not None:
        optimizer.drain()  # no round may be on its way
    rounds = _object_of(root_rank, optimizer.rounds, "hvd_async.optimizer_rounds")
    state = receive_state(optimizer, root_rank, "hvd_async.optimizer_state", _object_of, _tensors_of)
    optimizer.load_state_dict(state)
    optimizer._async.count_from(rounds)


def _object_of(root_rank: int, value: Any, name: str) -> Any:
    return hvd.broadcast_object(value, root_rank, name=name)


def _tensors_of(root_rank: int, tensors: list[torch.Tensor], name: str) -> list[torch.Tensor]:
    # (as bytes: Horovod does not carry all dtypes)
    return [from_bytes(hvd.broadcast(bytes_of(tensor), root_rank, name=name), tensor) for tensor in tensors]


def receive_state(
    optimizer: Any,
    root_rank: int,
    name: str,
    object_of: Callable[[int, Any, str], Any],
    tensors_of: Callable[[int, list[torch.Tensor], str], list[torch.Tensor]],
) -> dict[str, Any]:
    """Return the state of ``root_rank``'s optimizer, of which each rank has its own wrapped one. A collective.

    Args:
        optimizer: one of ours; it is not changed.
        root_rank: whose state.
        name: of the collectives.
        object_of, tensors_of: return a rank's value, and its tensors; collectives.
    """
    state = {**optimizer._wrapped_class.state_dict(optimizer), **optimizer._async.replica.extra_state()}
    tensors: list[torch.Tensor] = []

    def hollow(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return _Shape((tuple(value.shape), value.dtype))
        return _map(value, hollow)

    skeleton = object_of(root_rank, hollow(state), name)
    on_root = iter(list(tensors))
    received: list[torch.Tensor] = []

    def fill(value: Any) -> Any:
        if isinstance(value, _Shape):
            shape, dtype = value
            if hvd.rank() == root_rank:  # (Horovod takes contiguous tensors only)
                sent = next(on_root).cpu().clone(memory_format=torch.contiguous_format)
            else:
                sent = torch.zeros(shape, dtype=dtype)
            received.extend(tensors_of(root_rank, [sent], f"{name}.{len(received)}"))
            return received[-1]
        return _map(value, fill)

    received_state: dict[str, Any] = fill(skeleton)
    return received_state


def _map(value: Any, change: Any) -> Any:
    if isinstance(value, dict):
        return {key: change(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [change(inner) for inner in value]
    return value


def join(device: int = -1) -> int:
    """Say that this rank has no more batches: drains every one of our optimizers of this process.

    Horovod's ``join`` would silence this rank's engine; it is called only in a job that has none of our optimizers.

    Returns:
        The last rank to join.
    """
    last = LIFECYCLE.join()
    return int(hvd.join(device)) if last is None else last


def init(*arguments: Any, **options: Any) -> None:
    """Horovod's ``init``. In an elastic job it meets the others again where one of them dies meanwhile.

    Raises:
        ValueError: as Horovod's.
    """
    elastic.meet(hvd.shutdown, lambda: hvd.init(*arguments, **options))
    LIFECYCLE.initialized()


def shutdown() -> None:
    """Drain our optimizers, stop the engine, then shut Horovod down. All ranks call it."""
    LIFECYCLE.shutdown()
    hvd.shutdown()
    timeline.merge()  # now, since hvd.init() would begin Horovod's timeline anew
