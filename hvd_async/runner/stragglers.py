"""Injected stragglers: how long a rank sleeps before a step, as a pure function of (step, rank, size)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

Kind = Literal["none", "random", "rank", "linear"]
FORMS = "none, random:K:SECONDS, rank:R:SECONDS or linear:SECONDS"
_ARGUMENTS: dict[str, tuple[Kind, int]] = {
    "none": ("none", 0),
    "random": ("random", 2),
    "rank": ("rank", 2),
    "linear": ("linear", 1),
}


@dataclass(frozen=True)
class Injector:
    """Delays of one job. `number` is K of random, R of rank, unused otherwise; `delay` is in seconds."""

    kind: Kind
    number: int = 0
    delay: float = 0.0
    seed: int = 0

    def check(self, size: int) -> None:
        """Raise ValueError, with a hint, if these delays do not fit a job of `size` ranks."""
        if self.kind == "random" and self.number > size:
            raise ValueError(
                f"--inject random:{self.number}:{self.delay:g} delays {self.number} ranks a step, but the "
                f"job has {size}: start at least {self.number} ranks, or say random:{size}:{self.delay:g}"
            )
        if self.kind == "rank" and self.number >= size:
            raise ValueError(
                f"--inject rank:{self.number}:{self.delay:g} names rank {self.number}, but the job's ranks "
                f"are 0 to {size - 1}"
            )

    def seconds(self, step: int, rank: int, size: int) -> float:
        """The seconds that `rank` sleeps before its step `step` (0, 1, ...) in a job of `size` ranks.

        Every rank gets the same answer for the same arguments: the draw of `random` depends on (seed, step) only.
        """
        if self.kind == "random":
            return self.delay if rank in self._drawn(step, size) else 0.0
        if self.kind == "rank":
            return self.delay if rank == self.number else 0.0
        return rank * self.delay if self.kind == "linear" else 0.0

    def slowest(self, step: int, size: int) -> float:
        """The longest delay of any rank in `step`, in seconds: what a synchronous step cannot be shorter than."""
        if self.kind == "linear":
            return (size - 1) * self.delay
        return 0.0 if self.kind == "none" else self.delay

    def _drawn(self, step: int, size: int) -> frozenset[int]:
        generator = np.random.default_rng([self.seed, step])
        return frozenset(int(rank) for rank in generator.permutation(size)[: self.number])


def parse_inject(spec: str, seed: int = 0) -> Injector:
    """Read an `--inject` spec: none, random:K:SECONDS, rank:R:SECONDS, linear:SECONDS.

    Raises ValueError with a hint for anything else, and for a negative or endless delay.
    """
    name, *arguments = spec.strip().split(":")
    if name not in _ARGUMENTS or len(arguments) != _ARGUMENTS[name][1]:
        raise ValueError(f"--inject {spec!r} is not understood: say {FORMS}")
    kind = _ARGUMENTS[name][0]
    if kind == "none":
        return Injector("none", seed=seed)
    number = 0
    if len(arguments) == 2:
        what, least = ("K, the number of ranks to delay,", 1) if kind == "random" else ("R, the rank to delay,", 0)
        try:
            number = int(arguments[0])
        except ValueError:
            raise ValueError(f"--inject {spec!r}: {what} must be a whole number, not {arguments[0]!r}") from None
        if number < least:
            raise ValueError(f"--inject {spec!r}: {what} must be at least {least}")
    try:
        delay = float(arguments[-1])
    except ValueError:
        raise ValueError(f"--inject {spec!r}: SECONDS must be a number such as 0.3, not {arguments[-1]!r}") from None
    if not math.isfinite(delay) or delay < 0:
        raise ValueError(f"--inject {spec!r}: SECONDS must be finite and not negative")
    return Injector(kind, number, delay, seed)
