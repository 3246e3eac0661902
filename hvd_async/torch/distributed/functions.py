"""Horovod's functions of objects and optimizers on torch.distributed, and its ``SyncBatchNorm``."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hvd_async.torch import objects
from hvd_async.torch.distributed import world
from hvd_async.torch.distributed.calls import Call, Calls, Steps, Sum
from hvd_async.torch.distributed.collectives import allreduce, gathered
from hvd_async.torch.distributed.process_sets import ProcessSet, calls_of, global_process_set


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
        yield from calls.broadcast(data, place)
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


def DistributedOptimizer(*arguments: Any, **options: Any) -> Any:  # noqa: N802  Horovod's name
    """Return ``EagerOptimizer(..., quorum="all")``: synchronous averages of gradients, as Horovod's."""
    from hvd_async.torch.factories import EagerOptimizer  # (which stands on this module)

    return EagerOptimizer(*arguments, quorum="all", **options)


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
