"""What the optimizers of both bindings have in common that follow a leader: settings, losses, ends, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hvd_async import leaders
from hvd_async.events import LeaderConfig
from hvd_async.following import FollowWorker, Kept, Strengths
from hvd_async.lifecycle import Lifecycle
from hvd_async.local_wrapping import LocalState, LocalWrapped
from hvd_async.mail import Post
from hvd_async.sharers import Sharers
from hvd_async.stats import LeaderStats

ALGORITHMS = ("lsgd", "easgd")


class LeaderState(LocalState):
    """As ``LocalState``.

    Args:
        lifecycle: of the binding.
        sharers: the ranks that follow.
        config: of all of them.
        strengths: of the pulls.
        window: how many losses count.
        spread: by what this rank's learning rate is multiplied.
    """

    worker: FollowWorker | None

    def __init__(
        self,
        lifecycle: Lifecycle,
        sharers: Sharers,
        config: LeaderConfig,
        strengths: Strengths,
        window: int,
        spread: float,
    ) -> None:
        super().__init__(lifecycle, sharers)
        self.config, self.strengths, self.window, self.spread = config, strengths, window, spread
        self.stats_before = LeaderStats()
        self.losses: list[Any] = []
        """Recorded since the last step."""


def leader_config(
    size: int,
    host_size: Callable[[], int],
    *,
    algorithm: str,
    local_period: int,
    global_period: int,
    group: Any,
    strengths: Strengths,
    loss_window: int,
    buffers: str,
) -> LeaderConfig:
    """Check how ranks are to follow, and lay it out.

    Args:
        size: ranks that share the optimizer.
        host_size: ranks of a host; asked for ``group="host"`` only.
        algorithm: one of ``ALGORITHMS``.
        local_period, global_period: steps of each rank, on the average, between two pulls.
        group: as ``leaders.groups``.
        strengths: of the pulls.
        loss_window: losses that count.
        buffers: how batch-norm statistics agree: "local" or "average".

    Raises:
        ValueError: what cannot be, and what can.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm={algorithm!r} is not known: take one of {', '.join(map(repr, ALGORITHMS))}")
    for name, value in (("local_period", local_period), ("global_period", global_period), ("loss_window", loss_window)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}: take 1 or more")
    if algorithm == "lsgd" and local_period > global_period:
        raise ValueError(
            f"local_period={local_period} is above global_period={global_period}: groups follow their own leader more "
            f"often than that of all, a quarter of global_period is usual"
        )
    for name, value in vars(strengths).items():
        leaders.at(value, 1) if not callable(value) else None
        _ = name
    return LeaderConfig(
        algorithm=algorithm,
        groups=[list(ranks) for ranks in leaders.groups(group, size, host_size)],
        local_period=local_period,
        global_period=global_period,
        strengths=", ".join(f"{name} {value}" for name, value in vars(strengths).items() if not callable(value)),
        buffers=buffers,
    )


class LeaderWrapped(LocalWrapped):
    """Methods of every ``LeaderOptimizer``, beside those of ``LocalWrapped``."""

    _async: LeaderState

    # -- what a binding supplies ------------------------------------------------------------------------------

    def _async_post(self) -> Post:
        """How weights travel."""
        raise TypeError(f"{type(self).__name__} does not say how its weights travel")

    # -- for users --------------------------------------------------------------------------------------------

    def record_loss(self, loss: Any) -> None:
        """Say what this step's training loss was, before ``step()``: the lowest mean of the last ones leads.

        Args:
            loss: a number, or a tensor of one.
        """
        self._async.losses.append(loss)

    # -- the ranks' meeting -----------------------------------------------------------------------------------

    def _async_make(self, engine: Any, finish: Callable[[bool], None]) -> FollowWorker:
        state = self._async
        if state.worker is not None:
            state.stats_before = self.stats()
        groups = [tuple(state.sharers.ranks[place] for place in places) for places in state.config.groups]
        own = engine.collectives.subset([ranks for ranks in groups if 1 < len(ranks) < state.size])
        worker = FollowWorker(engine, state.config, state.strengths, self._async_post(), own, state.window, finish)
        if state.restored is not None:
            worker.restore(state.restored)
        return worker

    def _async_losses(self, worker: FollowWorker) -> None:
        """Hand over what was recorded."""
        state = self._async
        recorded, state.losses = state.losses, []
        for loss in recorded:
            worker.record_loss(float(loss))

    # -- checkpoints ------------------------------------------------------------------------------------------

    def _async_pack(self, kept: Kept | None) -> dict[str, Any]:
        return {"targets": {}, "losses": []} if kept is None else {"targets": dict(kept.targets), "losses": kept.losses}

    def _async_unpack(self, share: Mapping[str, Any]) -> Kept:
        return Kept(dict(share["targets"]), list(share["losses"]))
