"""What ``LeaderOptimizer`` adds to the class of the torch optimizer it wraps."""

from __future__ import annotations

from typing import Any

from hvd_async.leader_wrapping import LeaderState, LeaderWrapped
from hvd_async.mail import Post
from hvd_async.torch.local_mixin import LocalMixin, LocalSettings
from hvd_async.torch.parcels import make_post


class Settings(LocalSettings, LeaderState):
    """What the wrapper was given, and what it keeps between calls."""


class LeaderMixin(LocalMixin, LeaderWrapped):
    """Methods of a wrapped torch optimizer."""

    _async: Settings

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

    def _async_before_step(self, worker: Any) -> None:
        self._async_losses(worker)

    def _async_post(self) -> Post:
        self._async_check_parameters()
        return make_post(self._async_read(), "none", 1, self._async.sharers)
