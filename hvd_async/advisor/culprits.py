"""Who makes whom wait: from each rank's own work, so that a rank that is late because it had to wait is not blamed.

In a step of a job in which all wait for all, the others wait for the rank with the most work of its own in it. Pure.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]
BALANCED = 0.05
"""Share of a step that may be lost to waiting where ranks count as balanced."""
ALWAYS = 0.6
"""Share of the time lost from which one rank counts as always slow."""


class Culprits(NamedTuple):
    """Who makes whom wait.

    Attributes:
        work: mean seconds of a rank's own work in a step, by rank.
        last: share of the steps in which each rank had the most work.
        held: [culprit, waiting rank]: seconds a step that the one makes the other wait, if all wait for all.
        lost: share of the slowest rank's time that the mean rank would wait.
        waited: mean seconds a step that each rank has waited in the trace.
        slow: the rank that is to blame for most of it; None where it is now one, now another, or nobody.
    """

    work: Times
    last: Times
    held: Times
    lost: float
    waited: Times
    slow: int | None

    @property
    def blame(self) -> Times:
        """Share of all waiting that each rank causes; zeros where nobody waits."""
        total = self.held.sum()
        shares: Times = self.held.sum(axis=1) / total if total else np.zeros(len(self.work))
        return shares

    @property
    def balanced(self) -> bool:
        """Whether hardly anything is lost to waiting."""
        return self.lost < BALANCED

    def text(self) -> str:
        """Return what is found, in a sentence or two."""
        if self.balanced:
            return f"The ranks are balanced: {self.lost:.0%} of a step would be lost to waiting for the slowest rank."
        most = int(self.blame.argmax())
        lost = f"{self.lost:.0%} of a step is lost to waiting for the slowest rank."
        if self.slow is not None:
            own, others = self.work[self.slow], np.delete(self.work, self.slow).mean()
            return (
                f"Rank {self.slow} is slow: {own:.3g} s of its own work a step, the others {others:.3g} s; "
                f"it causes {self.blame[self.slow]:.0%} of all waiting. {lost}"
            )
        return (
            f"Now one rank is late, now another: none causes more than {self.blame[most]:.0%} of the waiting "
            f"(rank {most}). {lost}"
        )


def find_culprits(work: Times, waits: Times) -> Culprits:
    """Find who makes whom wait.

    Args:
        work: seconds of each rank's own work, [steps, ranks].
        waits: seconds that each rank has waited, [steps, ranks].
    """
    steps, ranks = work.shape
    last, most = work.argmax(axis=1), work.max(axis=1)
    held = np.zeros((ranks, ranks))
    np.add.at(held, last, (most[:, None] - work) / steps)
    lost = float(1 - work.mean() / most.mean())
    first = int(held.sum(axis=1).argmax())
    alone = ranks > 1 and held[first].sum() >= ALWAYS * held.sum() and lost >= BALANCED
    return Culprits(
        work=work.mean(axis=0),
        last=np.bincount(last, minlength=ranks) / steps,
        held=held,
        lost=lost,
        waited=waits.mean(axis=0),
        slow=first if alone else None,
    )
