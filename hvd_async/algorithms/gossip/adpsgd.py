"""AD-PSGD on one rank: the engine averages a shadow of its weights with neighbours' while it computes.

Lian et al., ICML 2018, Algorithm 1: whenever a rank is ready, its weights and a neighbour's become their mean, and
gradients computed at older weights are applied to the current ones. Here the coordinator pairs ranks, on any symmetric
graph; the training thread adds its optimizer's changes to the shadow and takes the shadow for its weights, so any
optimizer will do; the engine reads snapshots of the shadow only, so no rank ever waits for one that computes.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from typing import NamedTuple

from hvd_async.algorithms.gossip.base import GossipWorker
from hvd_async.algorithms.gossip.error_feedback import SavedState
from hvd_async.algorithms.gossip.message_exchange import MessageFormat, OutgoingMessage
from hvd_async.algorithms.gossip.messages import PairRequested, RankFinished, StartExchange
from hvd_async.algorithms.gossip.pairing import Pairing
from hvd_async.algorithms.gossip.plan import GossipPlan
from hvd_async.algorithms.gossip.push_sum import Add, Times
from hvd_async.algorithms.kept import Kept
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


def on_step(state: State, weights: Vector, add: Add, times: Times = operator.mul) -> State:
    """Return the state with the model's change added to the shadow; ``weights`` are the model's, given away."""
    change = add(weights, state.model, -1.0)
    shadow = add(state.shadow, change, 1.0)
    return State(shadow, times(shadow, 1.0))


def on_average(state: State, own: Vector, other: Vector, add: Add) -> State:
    """Return the state averaged with a neighbour: x <- x + (x_j - x_i) / 2, by both ranks' snapshots x_i and x_j."""
    return state._replace(shadow=add(add(state.shadow, other, 0.5), own, -0.5))


def check_weight(kept: SavedState, algorithm: str) -> None:
    """Refuse to begin with the state that an earlier run's cut saved.

    Raises:
        ValueError: it has a push-sum weight other than 1, which only push-sum can go on with.
    """
    if kept.weight != 1.0:
        raise ValueError(
            f"this state was saved after cut(), with push-sum weight {kept.weight:.6g}, and {algorithm} knows none: "
            f"go on with the algorithm that it was saved with, or save after drain()"
        )


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
        self._pairing = Pairing(
            plan.config.max_local_steps,
            plan.topology.neighbours(self._place),
            lambda: not self._announced,
            lambda: engine.send(PairRequested(self._registered_number())),
        )

    def restore(self, kept: SavedState) -> None:
        check_weight(kept, self.config.algorithm)
        super().restore(kept)

    def begin(self, weights: Vector) -> None:
        self._state = State(weights, weights + 0)

    def mix(self, before: Vector, after: Vector) -> Vector:
        """End a step; wait only after ``max_local_steps`` without an averaging."""
        self.check_step()
        if not self._pairing.may_step():
            self._await(self._pairing.may_step, lambda: "an averaging with a neighbour")
        self._count_step()
        self._pairing.stepped()
        with self._lock:
            self._state = on_step(self._state, after, self._post.add, self._post.times)
            z = self._state.model
            if self.log is not None:
                self.log.append(("step", self._before + self._step))
        self.engine.call_soon(self._pairing.ask)
        return z

    # -- ends -------------------------------------------------------------------------------------------------

    def gather(self, weights: Vector, flush: bool) -> Vector:
        with self._lock:
            self._state, self._together = on_step(self._state, weights, self._post.add, self._post.times), flush
            z = self._state.model
        if flush:
            z = self.consensus(z + 0)  # (if it is broken off, z is what this rank goes on from)
            with self._lock:
                self._state = State(z + 0, z)
                if self.log is not None:
                    self.log.append(("drained",))
        self._pairing.ended()
        return z

    def leave(self, weights: Vector) -> Kept:
        return Kept(on_step(self._state, weights, self._post.add, self._post.times).model)

    # -- engine thread ----------------------------------------------------------------------------------------

    def on_command(self, command: OptimizerCommand) -> None:
        """Carry out a command."""
        match command:
            case StartExchange(_, _, _, pairs):
                if any(self.engine.rank in pair for pair in pairs):
                    self._pairing.granted()
                super().on_command(command)
            case RankFinished(_, rank, _):
                super().on_command(command)
                with self.engine.changed:
                    self._pairing.finished(self._ranks.index(rank))
                    self.engine.changed.notify_all()
            case Drained():
                self._pairing.begin_anew(map(self._ranks.index, command.gone))
                super().on_command(command)
            case _:
                super().on_command(command)

    def _snapshots(self, command: StartExchange) -> list[tuple[int, OutgoingMessage]]:
        return [
            (command.round, OutgoingMessage(partner, self._snapshot(partner, command.round)))
            for pair in command.pairs
            if self.engine.rank in pair
            for partner in (self._ranks.index(rank) for rank in pair if rank != self.engine.rank)
        ]

    def _snapshot(self, partner: int, round_: int) -> Vector:
        with self._lock:
            shadow = self._state.shadow
            data = self._post.encode(self._post.times(shadow, 1.0) if self._post.lossless else shadow)
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
        self._averagings += 1
        self._taken += 1
        self._pairing.averaged()
