"""What ``LeaderOptimizer`` adds to the class of the torch optimizer it wraps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hvd_async.algorithms.leader.worker import LeaderWorker
from hvd_async.optimizers.leader import LeaderState, LeaderWrapped
from hvd_async.torch import streams
from hvd_async.torch.local_mixin import LocalMixin, LocalSettings


class Settings(LocalSettings, LeaderState):
    """What the wrapper was given, and what it keeps between calls."""


class LeaderMixin(LocalMixin, LeaderWrapped):
    """Methods of a wrapped torch optimizer."""

    _async: Settings

    def record_loss(self, loss: Any) -> None:
        """Say what this step's training loss was, before ``step()``: the lowest mean of the last ones leads.

        Args:
            loss: a number, or a tensor of one. (A closure's is recorded by ``step()``.)

        Raises:
            ValueError: it is several numbers.
        """
        if isinstance(loss, torch.Tensor):
            if loss.numel() != 1:
                raise ValueError(f"record_loss() takes one number, and this is a tensor of shape {tuple(loss.shape)}")
            loss = loss.detach().reshape(())
            loss = streams.Later(loss) if loss.is_cuda else loss
        super().record_loss(loss)

    def _async_make(self, engine: Any, finish: Callable[[bool], None]) -> LeaderWorker:
        self._async_check_parameters()  # groups may have been added since the wrapper was made
        return super()._async_make(engine, finish)

    def _async_before_step(self, worker: LeaderWorker, loss: Any) -> None:
        if loss is not None and not self._async.losses:
            self.record_loss(loss)
        self._async_losses(worker)

    def _async_plain_step(self) -> None:
        """With this rank's learning rates; schedulers see those that all ranks have."""
        rates, factor = [group["lr"] for group in self.param_groups], self._async.spread
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        try:
            super()._async_plain_step()
        finally:
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate

    @torch.no_grad()
    def _async_before_mix(self, worker: LeaderWorker) -> None:
        own = self._async_statistics()
        averaged = None if own is None else worker.settle_statistics(own, _clip)
        if averaged is not None:
            averages = self._async_averaged()
            for tensor, part in zip(averages, averaged.split([t.numel() for t in averages]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def _async_averaged(self) -> list[torch.Tensor]:
        """What pulls average beside the weights."""
        state = self._async
        if state.config.buffers != "average":
            return []
        return [t for _, t in state.named_buffers if t.is_floating_point() and t.numel()]

    @torch.no_grad()
    def _async_statistics(self) -> torch.Tensor | None:
        averages, kind = self._async_averaged(), self._async_kind()
        if not averages:
            return None
        own = torch.cat([*(t.reshape(-1).to(kind) for t in averages), averages[0].new_ones(1, dtype=kind)])
        return torch.where(torch.isfinite(own).all(), own, 0.0)  # (a GPU finds out by itself)

    def _async_copy_statistics(self, root: int) -> None:
        self._async_unify_by("root", root)

    def _async_fingerprint(self, resumed: bool) -> tuple[list[str], list[int]]:
        names, sums = super()._async_fingerprint(resumed)
        elements = sum(t.numel() for t in self._async_averaged())
        return [f"{elements} batch-norm statistics of named_buffers", *names], [0, *sums]


def _clip(vector: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.clamp(vector, torch.minimum(one, other), torch.maximum(one, other))
