"""AD-PSGD on one rank: the engine averages a shadow copy of the weights with neighbours while the rank computes.

Lian et al., ICML 2018, Algorithm 1: whenever a rank is ready, its weights and a neighbour's become their mean, and
gradients computed at older weights are applied to the current weights. Here the coordinator pairs ranks, on any
symmetric graph. The training thread adds its optimizer's changes to the shadow and loads the shadow as its weights, so
any optimizer can be used. The engine reads snapshots of the shadow only, so no rank waits for a rank that computes.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from hvd_async.algorithms.gossip.config import PairRequested, RankFinished, StartExchange
from hvd_async.algorithms.gossip.error_feedback import SavedState
from hvd_async.algorithms.gossip.message_format import MessageFormat, OutgoingMessage
from hvd_async.algorithms.gossip.plan import GossipPlan
from hvd_async.algorithms.gossip.push_sum import Add, Times
from hvd_async.algorithms.gossip.rank import GossipWorker, check_weight
from hvd_async.algorithms.kept import Kept
from hvd_async.runtime.interfaces import Program, RankRuntime, Vector, Wait
from hvd_async.runtime.protocol import Drained, OptimizerCommand

# -- requests for averagings -------------------------------------------------------------------------------------------


class Pairing:
    """Decides when a rank, or a host, requests an averaging with a neighbour, and when it waits for one.

    Args:
        most: steps that may be taken between two averagings.
        neighbours: places of the neighbours.
        may_ask: returns whether this rank may request averagings now.
        request: sends a request.

    Attributes:
        left: neighbours that have not finished.
    """

    def __init__(
        self, most: int, neighbours: Iterable[int], may_ask: Callable[[], bool], request: Callable[[], None]
    ) -> None:
        self._most, self._neighbours = most, frozenset(neighbours)
        self._may_ask, self._request = may_ask, request
        self.left = self._neighbours
        self._lock = threading.Lock()
        self._local = 0
        """Steps since the last averaging."""
        self._due = 0
        """Steps without an averaging of their own; -1: one averaging in advance (engine thread)."""
        self._asked = False
        """Whether a request is pending, in no exchange yet (engine thread)."""

    # -- training thread --------------------------------------------------------------------------------------

    def may_step(self) -> bool:
        """Return whether a step needs no averaging before it."""
        return self._local < self._most or not self.left

    def stepped(self) -> None:
        """Count a step; the engine's ``ask`` must follow."""
        with self._lock:
            self._local += 1

    def ended(self) -> None:
        """Restart the count of steps after a drain or cut."""
        with self._lock:
            self._local = 0

    # -- engine thread ----------------------------------------------------------------------------------------

    def ask(self) -> None:
        """Request an averaging for a step, unless one was done in advance."""
        self._due = min(self._due + 1, self._most)
        self.request_if_due()

    def request_if_due(self) -> None:
        """Request an averaging if one is due and no request is pending."""
        if self._due > 0 and not self._asked and self.left and self._may_ask():
            self._asked = True
            self._request()

    def granted(self) -> None:
        """Record that an exchange contains the requested averaging."""
        self._asked = False

    def averaged(self) -> None:
        """Count an averaging that has completed here."""
        with self._lock:
            self._local = 0
        # a rank limited to one step must request a pair in it: otherwise two that wait for each other are never paired
        self._due = max(self._due - 1, -1 if self._most > 1 else 0)
        self.request_if_due()

    def finished(self, neighbour: int) -> None:
        """Remove a neighbour that has finished."""
        self.left = self.left - {neighbour}

    def reset(self, gone: Iterable[int]) -> None:
        """Start after a drain or cut, with all neighbours except these."""
        self.left = self._neighbours - frozenset(gone)
        self._due, self._asked = 0, False


# -- the rank ----------------------------------------------------------------------------------------------------------


class State(NamedTuple):
    """State of a rank.

    Attributes:
        shadow: the current weights, shape (n,).
        model: the weights last loaded into the model, shape (n,); the model may have changed them since.
    """

    shadow: Vector
    model: Vector


def on_step(state: State, weights: Vector, add: Add, times: Times = operator.mul) -> State:
    """Return the state with the model's change added to the shadow; takes ownership of ``weights``, the model's."""
    change = add(weights, state.model, -1.0)
    shadow = add(state.shadow, change, 1.0)
    return State(shadow, times(shadow, 1.0))


def on_average(state: State, own: Vector, other: Vector, add: Add) -> State:
    """Return the state averaged with a neighbour: x <- x + (x_j - x_i) / 2, with both ranks' snapshots x_i and x_j."""
    return state._replace(shadow=add(add(state.shadow, other, 0.5), own, -0.5))


class ADPSGDWorker(GossipWorker):
    """AD-PSGD on one rank.

    Attributes:
        log: events in the order in which they changed the shadow: ("step", number), ("sent", exchange, partner's
            place), ("landed", exchange, partner's place).
    """

    def __init__(
        self, engine: RankRuntime, plan: GossipPlan, post: MessageFormat, finish: Callable[[bool], object]
    ) -> None:
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

    def mix_program(self, before: Vector, after: Vector) -> Program[Vector]:
        """End a step; wait only after ``max_local_steps`` without an averaging."""
        self.check_step()
        if not self._pairing.may_step():
            yield Wait(self._pairing.may_step, lambda: "an averaging with a neighbour")
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

    def gather_program(self, weights: Vector, flush: bool) -> Program[Vector]:
        with self._lock:
            self._state, self._together = on_step(self._state, weights, self._post.add, self._post.times), flush
            z = self._state.model
        if flush:
            z = yield from self.consensus_program(z + 0)  # (if this is interrupted, the rank continues from z)
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
                self._pairing.reset(map(self._ranks.index, command.gone))
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
