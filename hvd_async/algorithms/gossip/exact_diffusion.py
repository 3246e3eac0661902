"""Exact diffusion on one rank: neighbours are averaged as in SGP, and data that differ between ranks leave no bias.

Yuan, Ying, Zhao and Sayed, IEEE Transactions on Signal Processing, 2019, Part I, Algorithm 1; Tang et al., ICML 2018,
call it D^2. With U the wrapped optimizer's update, on a static symmetric graph with Wbar = (I + W) / 2:

    adapt:      psi_i^k = U(x_i^{k-1})
    correct:    phi_i^k = psi_i^k + x_i^{k-1} - psi_i^{k-1}
    combine:    x_i^k   = sum_j wbar_ij phi_j^k

Since x_i^k = phi_i^k + sum_j wbar_ij (phi_j^k - phi_i^k), the correction of the next step is x_i^k - psi_i^k =
sum_j wbar_ij f_ij, with f_ij the sum of phi_j - phi_i over all steps so far. A rank keeps these, one a neighbour, in
place of psi. f_ij = -f_ji to the bit, so on each edge corrections sum to 0 over both ends: the mean of all ranks moves
by their updates alone. Where a rank has finished, its neighbours take back what f_ij has moved them by since, and go on
without that edge; messages of a step that only one end of an edge has taken count at neither.

With H = ``gossip_every`` a rank combines in each H-th step and takes 1 / H of the correction in every one: each local
update is corrected, so their number leaves no bias either (local exact diffusion, Alghunaim, 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hvd_async.algorithms.gossip.error_feedback import SavedState
from hvd_async.algorithms.gossip.message_exchange import MessageFormat
from hvd_async.algorithms.gossip.neighbour_average import NeighbourAverageWorker
from hvd_async.algorithms.gossip.plan import GossipPlan
from hvd_async.algorithms.gossip.push_sum import Add, State
from hvd_async.runtime.engine import Engine
from hvd_async.runtime.interfaces import Vector


def corrected(psi: Vector, differences: Iterable[tuple[Vector, float]], steps: float, add: Add) -> Vector:
    """Return psi with a correction for so many steps, of (f_ij, wbar_ij); it may reuse the memory of psi."""
    for difference, weight in differences:
        psi = add(psi, difference, weight * steps)
    return psi


class ExactDiffusionWorker(NeighbourAverageWorker):
    """One optimizer of one rank under exact diffusion; its push-sum weight stays 1."""

    def __init__(self, engine: Engine, plan: GossipPlan, post: MessageFormat, finish: Callable[[bool], object]) -> None:
        super().__init__(engine, plan, post, finish)
        self._edges = dict(plan.in_edges(self._place, plan.config.period))
        """The weight of each neighbour, by place."""
        self._differences: dict[int, Vector] = {}
        """f_ij by neighbour."""

    def mix(self, before: Vector, after: Vector) -> Vector:
        self.check_step()
        self._count_step()
        phi = self._corrected(after, self._differences, 1)
        x = self._combined(phi) if self.plan.moves(self._base + self._step) else phi
        self._note()
        return self._average(State(x, 1.0)).x if self.plan.averages(self._base + self._step) else x

    def _corrected(self, x: Vector, places: Iterable[int], steps: int) -> Vector:
        """Return x with these neighbours' part of the correction for so many steps; it may reuse its memory."""
        parts = [(self._differences[place], self._edges[place]) for place in places]
        return corrected(x, parts, steps / self.config.period, self._post.add)

    def _combined(self, phi: Vector) -> Vector:
        """Exchange phi with the neighbours that take this step, and return their average."""
        own, others = self._exchanged(phi)
        x = self._post.times(phi, 1.0)
        for place, weight in self._edges.items():
            if place not in others:
                x = self._without_edge(x, place, self._receive_buffer.last(place, self._step))
                continue
            difference = others[place] - own
            x = self._post.add(x, difference, weight)
            known = self._differences.get(place)
            self._differences[place] = difference if known is None else self._post.add(known, difference, 1.0)
        return x

    def _without_edge(self, x: Vector, place: int, last: int) -> Vector:
        """Forget an edge; return x without its corrections since the neighbour's last step."""
        if place not in self._differences:
            return x
        x = self._corrected(x, [place], min(0, last - self._step))
        del self._differences[place]
        return x

    # -- ends -------------------------------------------------------------------------------------------------

    def gather(self, weights: Vector, flush: bool) -> Vector:
        for place in list(self._differences):
            if self._lasts[place] != self._step:
                weights = self._without_edge(weights, place, self._lasts[place])
        if flush:
            self._differences.clear()
        return super().gather(weights, flush)

    # -- checkpoints ------------------------------------------------------------------------------------------

    def _name(self, place: int) -> str:
        return f"difference to {place}: {self.config.graph}"

    def _estimates(self) -> dict[str, Vector]:
        return super()._estimates() | {self._name(place): own + 0 for place, own in self._differences.items()}

    def restore(self, kept: SavedState) -> None:
        names = {self._name(place): place for place in self._edges}
        self._differences = {names[name]: own + 0 for name, own in kept.copies.items() if name in names}
        super().restore(kept)
