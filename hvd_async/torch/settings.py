"""What a wrapped torch optimizer was given, and what it keeps between calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvd_async.algorithms.eager.gradient_format import ReducedRound
from hvd_async.optimizers.eager import EagerState
from hvd_async.runtime.process_sets import RankGroup
from hvd_async.torch.bucket_layout import MIB, Layout
from hvd_async.torch.collectives import LIFECYCLE
from hvd_async.torch.compression import slots
from hvd_async.torch.gradient_watch import Watch
from hvd_async.torch.nonfinite import Checks
from hvd_async.torch.overlap import Overlap
from hvd_async.torch.streams import record_ready

RoundTransform = Callable[[Sequence[torch.Tensor]], object]


class Settings(EagerState):
    """What the wrapper was given, and what it keeps between calls."""

    def __init__(self, sharers: RankGroup, named: dict[int, str] | None, options: dict[str, Any]) -> None:
        super().__init__(LIFECYCLE, sharers, options["config"], options["late_cap_mb"])
        self.named = named
        """Parameters' names by id; None if none were given."""
        self.layout = Layout([])
        self.slots = 1
        self.overlap: Overlap | None = None
        self.watch = Watch(self.layout)
        self.checks = Checks()
        self.passes: int = options["backward_passes_per_step"]
        self.bucket_cap_mb: float = options["bucket_cap_mb"]
        self.groups: Any = options["groups"]
        self.compression: Any = options["compression"]
        self.before, self.after = options["scales"]
        """By what a gradient is multiplied before it is handed over, and a round's sum when it is applied."""
        self.round_transform: RoundTransform | None = options["round_transform"]
        self.scaler: Any = options["scaler"]
        self.nonfinite: str = options["nonfinite"]
        self.named_buffers: list[tuple[str, torch.Tensor]] = options["named_buffers"]
        self.buffer_policy: str = options["buffers"]
        self.shown: ReducedRound | None = None
        """The round that ``synchronize()`` has put into p.grad, until step() applies it or the next one replaces it."""
        self.skip = self.one_by_one = False
        self.unshown = self.stepped = 0
        """Rounds applied since ``synchronize()`` last showed one; rounds since the last drain or cut that it showed and
        ``step()`` applied."""

    def lay_out(self, parameters: Sequence[torch.Tensor], bucket_ready: Callable[[int], None]) -> None:
        """Part the parameters into buckets, and hook them."""
        self.slots = slots(self.compression, parameters, self.size, self.config["max_staleness"])
        slot = self.index % self.slots
        self.layout = Layout(parameters, self.bucket_cap_mb * MIB, self.groups, self.slots, slot)
        if self.overlap is not None:
            self.overlap.remove()
        # A scaled step's overflow is known at its end only; nor can what is gone be raised about.
        scaled = self.scaler is not None and self.scaler.is_enabled()
        early = not scaled and self.nonfinite == "skip"
        self.overlap = Overlap(self.layout, self.passes, early, bucket_ready)
        self.watch = Watch(self.layout)

    def vector(self, index: int, scale: float | torch.Tensor) -> torch.Tensor:
        """A bucket's gradients x ``scale``."""
        return self.layout.vector(index, scale)

    def finite(self, index: int, vector: torch.Tensor) -> torch.Tensor | None:
        """A bucket's vector, or None if other ranks must not see it: NaN, an infinity.

        Raises:
            FloatingPointError: as None, if the user asked for it.
        """
        if vector.is_cuda and self.nonfinite == "skip" and self.config["quorum"] == "all":
            self.checks.empty_unless_finite(index, vector)
            return record_ready(vector)
        # (elsewhere a rank has arrived when its gradients are computed, and not when they are queued)
        # One pass; the sum of very large finite numbers may be infinite too, so then look closer.
        if torch.isfinite(vector.sum()) or torch.isfinite(vector).all():
            return record_ready(vector)
        if self.nonfinite == "raise":
            every = self.names(self.layout.parameters)
            names = [every[id(p)] for p in self.layout.buckets[index].parameters if not _finite(p.grad)]
            raise FloatingPointError(f"not finite: the gradients of {', '.join(names[:5])}")
        return None

    def names(self, parameters: Sequence[torch.Tensor]) -> dict[int, str]:
        """Names by the parameters' id."""
        named = self.named or {}
        return {id(p): named.get(id(p), f"parameter {index}") for index, p in enumerate(parameters)}


def _finite(gradient: torch.Tensor | None) -> bool:
    if gradient is None:
        return True
    return bool(torch.isfinite(gradient.coalesce().values() if gradient.is_sparse else gradient).all())
