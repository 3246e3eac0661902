"""Batch normalization whose statistics are those of all ranks' batches."""

from __future__ import annotations

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hvd_async.torch.distributed import world
from hvd_async.torch.distributed.collectives import Sum, allreduce


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
