"""The learning rate as a pure function of how many epochs have passed."""

from __future__ import annotations

import math
from dataclasses import dataclass

WARMUP_START = 0.1
"""The share of the base rate that a warm-up starts at: not 0, so that the first step does something."""


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then constant, step decay or cosine.

    base: the rate after warm-up. warmup: its length in epochs. decay_epochs: the epochs at which the rate is
    multiplied by `decay_factor`. cosine: fall to 0 along half a cosine between the end of warm-up and `epochs`.
    """

    base: float
    epochs: float
    warmup: float = 0.0
    decay_epochs: tuple[float, ...] = ()
    decay_factor: float = 0.1
    cosine: bool = False

    def __post_init__(self) -> None:
        if self.cosine and self.decay_epochs:
            raise ValueError("a schedule is either cosine or step decay, not both: leave one of them out")
        if self.warmup < 0 or (self.warmup and self.warmup >= self.epochs):
            raise ValueError(
                f"the warm-up of {self.warmup:g} epochs must be shorter than the {self.epochs:g} epochs "
                "of the run: lower --warmup-epochs or raise --epochs"
            )

    def rate(self, epoch: float) -> float:
        """The learning rate when `epoch` epochs (with fraction: 2.5 is the middle of the third) have passed."""
        if epoch < self.warmup:
            return self.base * (WARMUP_START + (1 - WARMUP_START) * max(epoch, 0.0) / self.warmup)
        if self.cosine:
            passed = min((epoch - self.warmup) / (self.epochs - self.warmup), 1.0)
            return self.base * 0.5 * (1 + math.cos(math.pi * passed))
        return self.base * self.decay_factor ** sum(epoch >= mark for mark in self.decay_epochs)
