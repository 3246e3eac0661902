"""AD-PSGD on one rank: the engine averages a shadow of its weights with neighbours' while it computes.

Lian et al., ICML 2018, Algorithm 1: whenever a rank is ready, its weights and a neighbour's become their mean, and
gradients computed at older weights are applied to the current ones. Here the coordinator pairs ranks, on any symmetric
graph; the training thread adds its optimizer's changes to the shadow and takes the shadow for its weights, so any
optimizer will do; the engine reads snapshots of the shadow only, so no rank ever waits for one that computes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from hvd_async.algorithms.gossip.base import GossipWorker
from hvd_async.algorithms.gossip.error_feedback import SavedState
from hvd_async.algorithms.gossip.message_exchange import MessageFormat
from hvd_async.algorithms.gossip.messages import PairRequested, RankFinished, StartExchange
from hvd_async.algorithms.gossip.plan import GossipPlan
from hvd_async.algorithms.gossip.push_sum import Add
from hvd_async.runtime.engine import Engine
from hvd_async.runtime.interfaces import Vector
from hvd_async.runtime.messages import Drained, OptimizerCommand


class State(NamedTuple):
    """One rank's state.

    Attributes:
        shadow: the current weights, shape (n,).
        model: the weights that the model was given last; beyond them it has its own change, whoever made it.
    """

    shadow: Vector
    model: Vector


def on_step(state: State, weights: Vector, add: Add) -> State:
    """Return the state with the model's change added to the shadow; ``weights`` are the model's, given away."""
    change = add(weights, state.model, -1.0)
    shadow = add(state.shadow, change, 1.0)
    return State(shadow, shadow + 0)


def on_average(state: State, own: Vector, other: Vector, add: Add) -> State:
    """Return the state averaged with a neighbour: x <- x + (x_j - x_i) / 2, by both ranks' snapshots x_i and x_j."""
    return state._replace(shadow=add(add(state.shadow, other, 0.5), own, -0.5))


class ADPSGDWorker(GossipWorker):
    """One optimizer of one rank under AD-PSGD.

    Attributes:
        log: events in the order in which they changed the shadow: ("step", number), ("sent", exchange, partner's
            place), ("landed", exchange, partner's place).
    """

    def __init__(self, engine: Engine, plan: GossipPlan, post: MessageFormat, finish: Callable[[bool], object]) -> None:
        super().__init__(engine, plan, post, finish)
        self._lock = threading.Lock()
        """Held while the shadow changes, and while the log does."""
        self._state = State(None, None)
        self._mine: dict[int, Vector] = {}
        """Snapshots sent, encoded, by exchange (engine thread)."""
        self._owed = 0
        """Averagings that this rank is behind its steps; -1: one before (engine thread)."""
        self._asked = False
        """Whether it has requested one that no exchange has (engine thread)."""
        self._left = set(plan.topology.neighbours(self._place))
        """Neighbours that have not finished."""
        self._local = 0
        """Steps since the last averaging."""

    def restore(self, kept: SavedState) -> None:
        """Begin with the state that an earlier run's cut saved.

        Raises:
            ValueError: it has a push-sum weight other than 1, which only push-sum can go on with.
        """
        if kept.weight != 1.0:
            raise ValueError(
                f"this state was saved after cut(), with push-sum weight {kept.weight:.6g}, and adpsgd knows none: go "
                f"on with the algorithm that it was saved with, or save after drain()"
            )
        super().restore(kept)

    def begin(self, weights: Vector) -> None:
        self._state = State(weights, weights + 0)

    def mix(self, before: Vector, after: Vector) -> Vector:
        """End a step; wait only after ``max_local_steps`` without an averaging."""
        self.check_step()
        limit = self.config.max_local_steps
        if self._local >= limit:
            self._await(lambda: self._local < limit or not self._left, lambda: "an averaging with a neighbour")
        self._step += 1
        with self._lock:
            self._local += 1
            self._state = on_step(self._state, after, self._post.add)
            z = self._state.model
            if self.log is not None:
                self.log.append(("step", self._before + self._step))
        self.engine.call_soon(self._ask)
        return z

    # -- ends -------------------------------------------------------------------------------------------------

    def gather(self, weights: Vector, flush: bool) -> Vector:
        with self._lock:
            self._state, self._together = on_step(self._state, weights, self._post.add), flush
            z = self._state.model
        if flush:
            z = self.consensus(z)
            with self._lock:
                self._state = State(z + 0, z)
                if self.log is not None:
                    self.log.append(("drained",))
        self._local = 0
        return z

    # -- engine thread ----------------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Request an averaging for a step, if none was done in advance."""
        self._owed = min(self._owed + 1, self.config.max_local_steps)
        self._want()

    def _want(self) -> None:
        if self._owed > 0 and not self._asked and self._left and not self._announced:
            self._asked = True
            self.engine.send(PairRequested(self._registered_number()))

    def on_command(self, command: OptimizerCommand) -> None:
        """Carry out a command."""
        match command:
            case StartExchange(_, _, _, pairs):
                if any(self.engine.rank in pair for pair in pairs):
                    self._asked = False
                super().on_command(command)
            case RankFinished(_, rank, _):
                super().on_command(command)
                with self.engine.changed:
                    self._left.discard(self._ranks.index(rank))
                    self.engine.changed.notify_all()
            case Drained():
                gone = set(map(self._ranks.index, command.gone))
                self._left = set(self.plan.topology.neighbours(self._place)) - gone
                self._owed, self._asked = 0, False
                super().on_command(command)
            case _:
                super().on_command(command)

    def _snapshot(self, partner: int, round_: int) -> Vector:
        with self._lock:
            data = self._post.encode(self._state.shadow + 0)
            if self.log is not None:
                self.log.append(("sent", round_, partner))
        self._mine[round_] = data
        return data

    def _deliver(self, sender: int, key: int, weight: float, data: Vector) -> None:
        mine = self._post.decode(self._mine.pop(key))
        theirs = self._post.decode(data)
        with self._lock:
            self._state = on_average(self._state, mine, theirs, self._post.add)
            if self.log is not None:
                self.log.append(("landed", key, sender))
            self._local = 0
        self._averagings += 1
        self._taken += 1
        # a rank limited to one step must request a pair in it: two that wait for each other would never be paired
        self._owed = max(self._owed - 1, -1 if self.config.max_local_steps > 1 else 0)
        self._want()
