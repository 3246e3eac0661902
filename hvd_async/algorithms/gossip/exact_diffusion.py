"""Exact diffusion on one rank: averages with neighbours as in SGP, without a bias from different data.

Yuan, Ying, Zhao and Sayed, IEEE Transactions on Signal Processing, 2019, Part I, Algorithm 1; Tang et al., ICML 2018,
call it D^2. With U the wrapped optimizer's update, on a static symmetric graph with Wbar = (I + W) / 2:

    adapt:      psi_i^k = U(x_i^{k-1})
    correct:    phi_i^k = psi_i^k + x_i^{k-1} - psi_i^{k-1}
    combine:    x_i^k   = sum_j wbar_ij phi_j^k

Since x_i^k = phi_i^k + sum_j wbar_ij (phi_j^k - phi_i^k), the correction of the next step is x_i^k - psi_i^k =
sum_j wbar_ij f_ij, with f_ij the sum of phi_j - phi_i over all steps so far. A rank keeps these, one per neighbour,
instead of psi. f_ij = -f_ji to the bit, so on each edge the corrections of both ends sum to 0: the mean of all ranks
changes by their updates only. When a rank has finished, its neighbours undo the corrections by f_ij since then, and
continue without that edge. Messages of a step that only one end of an edge has taken count at neither end.

With H = ``gossip_every`` a rank combines every H steps and applies 1 / H of the correction in each step. So each local
update is corrected, and local steps leave no bias either (local exact diffusion, Alghunaim, 2024).

The correction cancels the effect of different data in one update, which is proportional to the learning rate. So a step
of rate r applies r / R of it, with R the largest rate since the last drain: f_ij is in units of R. At a rate of 0, or
while a parameter is frozen, nothing is added. The factor is applied when f_ij is used; f_ij itself is never rescaled.
Hence f_ij = -f_ji holds to the bit even if ranks change their rates at different steps, and disagreement from an
earlier, larger rate is not magnified when the rate rises again. (After the rate exceeds R, the correction is too small
for some steps, as in the first steps.)

A constraint is applied to x_i^k, after "combine", and f_ij uses the phi_j from before it. This is proximal exact
diffusion (Alghunaim, Yuan and Sayed, NeurIPS 2019), which converges to the constrained minimum.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from hvd_async.algorithms.gossip.error_feedback import SavedState
from hvd_async.algorithms.gossip.push_sum import Add
from hvd_async.algorithms.gossip.rank import NeighbourAverageWorker
from hvd_async.runtime.interfaces import Program, Vector

LARGEST, MOVING = "largest learning rates", "learning rates of updates"
"""Names of vectors in a checkpoint after ``cut()``."""


def corrected(
    psi: Vector, differences: Iterable[tuple[Vector, float]], factors: Sequence[tuple[slice, float]], add: Add
) -> Vector:
    """Return psi with the correction added; may reuse the memory of psi.

    Args:
        psi: shape (n,).
        differences: (f_ij, wbar_ij) of each neighbour.
        factors: each part of the vector, in order, with its factor; a single part is the entire vector.
        add: as in ``push_sum``.
    """
    for difference, weight in differences:
        if len(factors) == 1:
            psi = add(psi, difference, weight * factors[0][1]) if factors[0][1] else psi
            continue
        for part, factor in factors:
            psi[part] += difference[part] * (weight * factor)
    return psi


class StepFactors:
    """The factors r / R of the correction in each step, per part of the weights with its own learning rate.

    Args:
        memory: number of last steps that ``sum_of`` can return.

    Attributes:
        largest: R of each part.
        moving: the rate of each part, averaged over steps as the optimizer's momentum averages it.
    """

    def __init__(self, memory: int) -> None:
        self.largest: list[float] = []
        self.moving: list[float] = []
        self._parts: list[slice] = [slice(None)]
        self._last: deque[list[float]] = deque(maxlen=memory)

    def step(self, rates: Sequence[tuple[int, float]], inertia: tuple[float, float]) -> None:
        """Begin a step.

        Args:
            rates: (elements, learning rate) of the parts; empty if the rate is unknown and does not change.
            inertia: how an update depends on rates of earlier steps; see ``WeightReplica.inertia``.
        """
        if not rates:
            self._last.append([1.0])
            return
        now = [rate for _, rate in rates]
        ends = list(itertools.accumulate(elements for elements, _ in rates))
        starts = [0, *ends[:-1]]
        self._parts = [slice(*each) for each in zip(starts, ends, strict=True)] if len(ends) > 1 else [slice(None)]
        before = self.moving if len(self.moving) == len(now) else now
        beta, lead = inertia
        self.moving = [beta * old + (1.0 - beta) * rate for old, rate in zip(before, now, strict=True)]
        of_update = [(1.0 - lead) * old + lead * rate for old, rate in zip(self.moving, now, strict=True)]
        largest = self.largest if len(self.largest) == len(now) else [0.0] * len(now)
        self.largest = [max(pair) for pair in zip(largest, of_update, strict=True)]
        self._last.append([r / most if most else 0.0 for r, most in zip(of_update, self.largest, strict=True)])

    def sum_of(self, steps: int) -> list[tuple[slice, float]]:
        """Return each part of the weights with the sum of its factors in the last ``steps`` steps."""
        last = list(self._last)[len(self._last) - steps :] if steps else []
        sums = [math.fsum(each) for each in zip(*last, strict=True)] or [0.0] * len(self._parts)
        return list(zip(self._parts, sums, strict=True))

    @property
    def has_moved(self) -> bool:
        """Whether a learning rate has been above 0 since the last drain, or no rate is known."""
        return not self.largest or any(self.largest)

    def restart(self) -> None:
        """Forget all rates, at a drain."""
        self.largest, self.moving = [], []
        self._last.clear()


class ExactDiffusionWorker(NeighbourAverageWorker):
    """Exact diffusion on one rank; its push-sum weight stays 1."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._edges = dict(self.plan.in_edges(self._place, self.plan.config.period))
        """The weight of each neighbour, by place."""
        self._differences: dict[int, Vector] = {}
        """f_ij by neighbour."""
        self._factors = StepFactors(self.plan.config.period)

    def mix_program(self, before: Vector, after: Vector) -> Program[Vector]:
        self.check_step()
        self._count_step()
        self._factors.step(self.learning_rates(), self.inertia())
        phi = self._corrected(after, self._differences, 1, 1.0)
        x = (yield from self._combined(phi)) if self.plan.moves(self._base + self._step) else phi
        self._note_received()
        if self.plan.averages(self._base + self._step):
            x, _ = yield from self._average(x, [1.0])
        return x

    def _corrected(self, x: Vector, places: Iterable[int], steps: int, sign: float) -> Vector:
        """Return x with the correction of the last ``steps`` steps by these neighbours, times ``sign``; may reuse the
        memory of x."""
        parts = [(self._differences[place], self._edges[place]) for place in places]
        if not parts or not steps:
            return x
        frozen = [(part, x[part] + 0) for part in self.frozen()]
        factors = [(part, sign * factor / self.config.period) for part, factor in self._factors.sum_of(steps)]
        x = corrected(x, parts, factors, self._post.add)
        for part, own in frozen:
            x[part] = own
        return x

    def _combined(self, phi: Vector) -> Program[Vector]:
        """Exchange phi with the neighbours that take this step, and return the average."""
        own, others = yield from self._exchanged(phi)
        x = self._post.times(phi, 1.0)
        for place, weight in self._edges.items():
            if place not in others:
                x = self._without_edge(x, place, self._receive_buffer.last(place, self._step))
                continue
            difference = others[place] - own
            x = self._post.add(x, difference, weight)
            if not self._factors.has_moved:
                continue  # (no gradient has had an effect yet: there is nothing to cancel)
            known = self._differences.get(place)
            self._differences[place] = difference if known is None else self._post.add(known, difference, 1.0)
        return x

    def _without_edge(self, x: Vector, place: int, last: int) -> Vector:
        """Remove an edge; return x without its corrections since the neighbour's last step."""
        if place not in self._differences:
            return x
        x = self._corrected(x, [place], max(0, self._step - last), -1.0)
        del self._differences[place]
        return x

    # -- ends -------------------------------------------------------------------------------------------------

    def gather_program(self, weights: Vector, flush: bool) -> Program[Vector]:
        for place in list(self._differences):
            if self._lasts[place] != self._step:
                weights = self._without_edge(weights, place, self._lasts[place])
        if flush:
            self._differences.clear()
            self._factors.restart()
        return (yield from super().gather_program(weights, flush))

    # -- checkpoints ------------------------------------------------------------------------------------------

    def _name(self, place: int) -> str:
        return f"difference to {place}: {self.config.graph}"

    def _estimates(self) -> dict[str, Vector]:
        saved = {self._name(place): own + 0 for place, own in self._differences.items()}
        for name, rates in ((LARGEST, self._factors.largest), (MOVING, self._factors.moving)):
            if rates:
                saved[name] = self._post.concatenate([self._post.scalar(rate) for rate in rates])
        return super()._estimates() | saved

    def restore(self, kept: SavedState) -> None:
        names = {self._name(place): place for place in self._edges}
        self._differences = {names[name]: own + 0 for name, own in kept.copies.items() if name in names}
        self._factors.largest = [float(rate) for rate in kept.copies.get(LARGEST, ())]
        self._factors.moving = [float(rate) for rate in kept.copies.get(MOVING, ())]
        super().restore(kept)
