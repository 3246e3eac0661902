"""Injected stragglers: the seconds that a rank sleeps before a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvd_async.algorithms.option import Real, Whole

FORMS = "none, random:K:SECONDS, rank:R:SECONDS or linear:SECONDS"
_PARTS = {"none": 0, "random": 2, "rank": 2, "linear": 1}
"""Number of parts after the name, by kind."""


@dataclass(frozen=True)
class Injector:
    """Delays of a job.

    Attributes:
        kind: "none", "random", "rank" or "linear".
        number: K of random, R of rank, else 0.
        delay: SECONDS.
        seed: of the draws of random.
    """

    kind: str
    number: int = 0
    delay: float = 0.0
    seed: int = 0

    @classmethod
    def parse(cls, spec: str, seed: int = 0) -> Injector:
        """Return the delays that a value of --inject describes.

        Raises:
            ValueError: it is not one of ``FORMS``.
        """
        kind, *parts = spec.strip().split(":")
        if len(parts) != _PARTS.get(kind):
            raise ValueError(f"--inject must be {FORMS}, got {spec!r}")
        try:
            number = Whole(1 if kind == "random" else 0)(parts[0]) if len(parts) == 2 else 0
            delay = Real(0)(parts[-1]) if parts else 0.0
        except ValueError as error:
            raise ValueError(f"--inject must be {FORMS}, got {spec!r}: {error}") from None
        return cls(kind, number, delay, seed)

    def check(self, size: int) -> None:
        """Refuse delays that do not fit a job of ``size`` ranks.

        Raises:
            ValueError: a delay names more ranks than there are.
        """
        if self.kind == "random" and self.number > size:
            raise ValueError(
                f"--inject random:{self.number}:{self.delay:g} delays {self.number} ranks per step, but the job has "
                f"{size}: start at least {self.number} ranks, or pass random:{size}:{self.delay:g}"
            )
        if self.kind == "rank" and self.number >= size:
            raise ValueError(f"--inject rank:{self.number}:{self.delay:g}: the job's ranks are 0 to {size - 1}")

    def seconds(self, step: int, rank: int, size: int) -> float:
        """Return the seconds that ``rank`` sleeps before a step in a job of ``size`` ranks, the same on every rank."""
        if self.kind == "random":
            drawn = np.random.default_rng([self.seed, step]).permutation(size)[: self.number]
            return self.delay if rank in drawn else 0.0
        if self.kind == "rank":
            return self.delay if rank == self.number else 0.0
        return rank * self.delay if self.kind == "linear" else 0.0

    def slowest(self, size: int) -> float:
        """Return the longest delay of any rank in a step, in seconds: a lower bound of a synchronous step."""
        if self.kind == "linear":
            return (size - 1) * self.delay
        return 0.0 if self.kind == "none" else self.delay
