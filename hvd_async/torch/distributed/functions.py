"""Horovod's functions of objects, parameters and optimizers on torch.distributed, and its ``SyncBatchNorm``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm

from hvd_async.torch import objects
from hvd_async.torch.distributed import world
from hvd_async.torch.distributed.calls import Adasum, Average, Call, Calls, Steps, Sum, until_done
from hvd_async.torch.distributed.collectives import (
    Compression,
    allreduce,
    broadcast_async_,
    gathered,
    synchronize,
)
from hvd_async.torch.distributed.process_sets import ProcessSet, calls_of, global_process_set
from hvd_async.torch.distributed.world import no_counterpart


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the object of ``root_rank``.

    Raises:
        ValueError: it cannot be pickled; on all ranks.
    """
    calls = calls_of(process_set)
    place = calls.place_of(root_rank)
    own = objects.pack(obj) if calls.place == place else b""

    def run(everyones: list[Call]) -> Steps:
        data = torch.frombuffer(bytearray(own) or bytearray(everyones[place].splits[0]), dtype=torch.uint8)
        options = dist.BroadcastOptions()
        options.rootRank = place
        yield from until_done(calls.group.broadcast([data], options))
        return data.numpy().tobytes()

    call = Call("broadcast_object", name or "", options={"root_rank": root_rank}, splits=[len(own)])
    received = objects.unpack(calls.begin(call, run).wait(), root_rank)
    return obj if own else received


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all ranks, in the order of the ranks.

    Raises:
        ValueError: one of them cannot be pickled; on all ranks.
    """
    return gather_objects(calls_of(process_set), obj, name)


def gather_objects(calls: Calls, obj: Any, name: str | None = None) -> list[Any]:
    """Return the objects of all ranks of some collectives; see ``allgather_object``."""
    own = torch.frombuffer(bytearray(objects.pack(obj)), dtype=torch.uint8)

    def run(everyones: list[Call]) -> Steps:
        sizes = [one.splits[0] for one in everyones]
        rows = yield from gathered(calls, own, sizes)
        return [part.numpy().tobytes() for part in rows.split(sizes)]

    received = calls.begin(Call("allgather_object", name or "", splits=[len(own)]), run).wait()
    return [objects.unpack(data, rank) for rank, data in zip(calls.ranks, received, strict=True)]


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Send the tensors of ``root_rank`` to every rank, in place.

    Args:
        params: a dictionary of tensors, or a list of tensors or of pairs (name, tensor); the same names on all ranks.
        root_rank: the rank whose tensors are sent.
    """
    if not isinstance(params, Mapping | list):
        raise ValueError(f"params must be a dict or a list, got {type(params).__name__}. Pass model.state_dict().")
    listed = sorted(params.items()) if isinstance(params, Mapping) else params
    pairs = [one if isinstance(one, tuple) else (None, one) for one in listed]
    for handle in [broadcast_async_(tensor, root_rank, name) for name, tensor in pairs]:
        synchronize(handle)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """Send the state and the options of ``root_rank``'s optimizer to every rank.

    Args:
        optimizer: any torch optimizer; it need not have taken a step.
        root_rank: the rank whose state is sent.
        model: not needed.
    """
    on_root = world.current().rank == root_rank
    state = broadcast_object(optimizer.state_dict() if on_root else None, root_rank, "optimizer_state")
    if not on_root:
        optimizer.load_state_dict(state)


def DistributedOptimizer(  # noqa: N802  Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return ``EagerOptimizer(optimizer, ..., quorum="all")``: synchronous averages of gradients, as Horovod's.

    Raises:
        NotImplementedError: ``op`` is ``hvd.Adasum``.
    """
    if op == Adasum:
        no_counterpart("op=hvd.Adasum", "Pass op=hvd.Average or op=hvd.Sum.")
    from hvd_async.torch.factories import EagerOptimizer  # (which stands on this module)

    make: Callable[..., Any] = EagerOptimizer
    return make(
        optimizer,
        named_parameters,
        compression,
        backward_passes_per_step,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        sparse_as_dense,
        process_set,
        quorum="all",
    )


class SyncBatchNorm(_BatchNorm):
    """Batch normalization over the batches of all ranks, for tensors of shape (batch, channels, ...).

    Args: as of ``torch.nn.BatchNorm2d``. Gradients reach the other ranks' inputs too. Evaluation is that of ordinary
    batch normalization.
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm takes tensors of at least two dimensions, got {input.dim()}.")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize a tensor."""
        self._check_input_dim(input)
        if not self.training or world.current().size == 1:
            return super().forward(input)
        over = [0, *range(2, input.dim())]
        shape = [1, -1, *(1 for _ in range(2, input.dim()))]
        wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        own = wide.new_tensor([input.numel() / input.shape[1]])
        sums = allreduce(torch.cat([wide.sum(over), own]), op=Sum, name="sync_batch_norm.mean")
        count = sums[-1].detach()
        mean = sums[:-1] / count
        centered = wide - mean.view(shape)
        variance = allreduce((centered * centered).sum(over), op=Sum, name="sync_batch_norm.variance") / count
        if self.track_running_stats:
            self._track(mean.detach(), variance.detach() * (count / (count - 1)))
        output = centered * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            output = output * self.weight.view(shape) + self.bias.view(shape)
        return output.to(input.dtype)

    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        for running, now in ((self.running_mean, mean), (self.running_var, variance)):
            assert running is not None
            running.lerp_(now.to(running.dtype), share)
