"""AD-PSGD as one rank sees it: the engine averages a shadow of its weights with neighbours' while it computes.

Lian et al., ICML 2018: whenever a rank is ready, its weights and a neighbour's become their mean, and gradients that
were computed at older weights are applied to the current ones. Here the coordinator pairs ranks, on any symmetric
graph; the training thread adds what its optimizer has changed to the shadow and takes the shadow for its weights, so
any optimizer will do; the engine reads snapshots of the shadow only, so no rank ever waits for one that computes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from hvd_async.algorithms.gossip.error_feedback import SavedState
from hvd_async.algorithms.gossip.message_exchange import MessageFormat
from hvd_async.algorithms.gossip.messages import PairRequested, RankFinished, StartExchange
from hvd_async.algorithms.gossip.plan import GossipPlan
from hvd_async.algorithms.gossip.worker import PushSumWorker
from hvd_async.runtime.engine import Engine
from hvd_async.runtime.interfaces import Vector
from hvd_async.runtime.messages import Drained, OptimizerCommand


class ADPSGDWorker(PushSumWorker):
    """One optimizer of one rank under AD-PSGD.

    Attributes:
        log: in the order in which they have changed the shadow: ("step", number), ("sent", exchange, partner's place),
            ("landed", exchange, partner's place).
    """

    def __init__(self, engine: Engine, plan: GossipPlan, post: MessageFormat, finish: Callable[[bool], object]) -> None:
        super().__init__(engine, plan, post, finish)
        self._lock = threading.Lock()
        """Held while the shadow changes, and while the log does."""
        self._shadow: Vector = None
        self._shown: Vector = None
        """The weights that the model was given last: what it has beyond them is its own change, whoever made it."""
        self._mine: dict[int, Vector] = {}
        """What was sent, as the partner reads it, by exchange (engine thread)."""
        self._owed = 0
        """Averagings that this rank is behind its steps; -1: one before (engine thread)."""
        self._asked = False
        """Whether it wants one, and none has been ordered (engine thread)."""
        self._left = set(plan.topology.neighbours(self._place))
        """Neighbours that are not done."""
        self._local = 0
        """Steps since the last averaging."""

    def restore(self, kept: SavedState) -> None:
        """As ``PushSumWorker.restore``.

        Raises:
            ValueError: this rank's weights count for more or less than others', which only push-sum knows what to do
                with.
        """
        if kept.weight != 1.0:
            raise ValueError(
                f"this state was saved after cut(), with push-sum weight {kept.weight:.6g}, and adpsgd knows none: go "
                f"on with the algorithm that it was saved with, or save after drain()"
            )
        super().restore(kept)

    def begin(self, weights: Vector) -> None:
        """The model's weights, shape (n,), the same on all ranks, before they meet; they belong to the worker."""
        self._shadow, self._shown = weights, weights + 0

    def mix(self, before: Vector, after: Vector) -> Vector:
        """End a step, as ``PushSumWorker.mix``; waits only after ``max_local_steps`` without an averaging."""
        self._opened_number()
        self._check_drained()
        limit = self.config.max_local_steps
        if self._local >= limit:
            self._await(lambda: self._local < limit or not self._left, lambda: "an averaging with a neighbour")
        self._step += 1
        with self._lock:
            self._local += 1
            z = self._changed(after)
            if self.log is not None:
                self.log.append(("step", self._before + self._step))
        self.engine.call_soon(self._ask)
        return z

    def _changed(self, weights: Vector) -> Vector:
        """Add to the shadow what the model's weights have beyond what they were given; returns the shadow's."""
        change = self._post.add(weights, self._shown, -1.0)
        self._shadow = self._post.add(self._shadow, change, 1.0)
        self._shown = self._shadow + 0
        return self._shown

    # -- ends -------------------------------------------------------------------------------------------------

    def gather(self, weights: Vector, flush: bool) -> Vector:
        """In a drain or cut: the average of all ranks with ``flush``, else this rank's own; as ``PushSumWorker``."""
        with self._lock:
            z, self._together = self._changed(weights), flush
        if flush:
            z = self._shown = self.consensus(z)
            with self._lock:
                self._shadow = z + 0
                if self.log is not None:
                    self.log.append(("drained",))
        self._local = 0
        return z

    # -- engine thread ----------------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Want an averaging for a step, if none came in advance."""
        self._owed = min(self._owed + 1, self.config.max_local_steps)
        self._want()

    def _want(self) -> None:
        if self._owed > 0 and not self._asked and self._left and not self._announced:
            self._asked = True
            self.engine.send(PairRequested(self._opened_number()))

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
            data = self._post.encode(self._shadow + 0)
            if self.log is not None:
                self.log.append(("sent", round_, partner))
        self._mine[round_] = data
        return data

    def _deliver(self, sender: int, key: int, weight: float, data: Vector) -> None:
        mine = self._post.decode(self._mine.pop(key))
        theirs = self._post.decode(data)
        with self._lock:
            self._shadow = self._post.add(self._post.add(self._shadow, theirs, 0.5), mine, -0.5)
            if self.log is not None:
                self.log.append(("landed", key, sender))
            self._local = 0
        self._averagings += 1
        self._taken += 1
        # (a rank that may take one step only must ask in it: two that wait for one another would never meet)
        self._owed = max(self._owed - 1, -1 if self.config.max_local_steps > 1 else 0)
        self._want()
