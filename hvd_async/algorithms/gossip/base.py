"""Base of the gossip workers: counts of steps, exchanges, ends, and averages at ends. No mixing is done here."""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvd_async.algorithms.gossip.difference_average import DifferenceAverages
from hvd_async.algorithms.gossip.error_feedback import SavedState
from hvd_async.algorithms.gossip.global_average import GlobalAverages
from hvd_async.algorithms.gossip.message_exchange import MessageExchange, MessageFormat, OutgoingMessage
from hvd_async.algorithms.gossip.messages import GossipConfig, RankFinished, StartAverage, StartExchange
from hvd_async.algorithms.gossip.options import ALGORITHMS
from hvd_async.algorithms.gossip.plan import GossipPlan
from hvd_async.algorithms.gossip.receive_buffer import ReceiveBuffer
from hvd_async.algorithms.kept import Kept
from hvd_async.errors import GradientLossError, ReplicaStateError
from hvd_async.runtime.engine import Engine
from hvd_async.runtime.interfaces import Vector
from hvd_async.runtime.messages import Drained, OptimizerCommand
from hvd_async.runtime.worker import Worker
from hvd_async.stats import GossipStats

WEIGHT_TOLERANCE = 1e-6
"""Relative tolerance of the sum of push-sum weights."""
MEAN = "the average of all ranks"
"""The collective in which ranks sum their weights, for people."""


class GossipWorker(Worker):
    """One optimizer of one rank that gossips.

    Args:
        engine: this rank's.
        plan: edges of each step.
        post: the format of messages.
        finish: as ``Worker``.

    Attributes:
        keep: the optimizer, which must live until the next drain: other ranks count on this one's weights.
        learning_rates: returns (elements, rate) of consecutive parts of the weights, with the learning rate of this
            step; always the same parts. Empty: the rate is not known and does not change.
        inertia: returns how an update depends on learning rates of earlier steps; see ``WeightReplica.inertia``.
        sizes: returns the number of elements of each parameter, in the order of the vector of weights.
        frozen: returns the elements of parameters that are frozen on this rank now.
        defers_sends: whether constraints or post-step hooks may change the weights that ``mix`` returns.
        log: events for a test, as the subclass says; None: they are not recorded.
    """

    _averages: GlobalAverages | DifferenceAverages
    """Averages of all ranks, of an algorithm that has any between ends."""

    def __init__(self, engine: Engine, plan: GossipPlan, post: MessageFormat, finish: Callable[[bool], object]) -> None:
        super().__init__(engine, plan.config, post.members, post.process_set, post.process_set_id, finish)
        self.config: GossipConfig = plan.config
        self.plan, self._post = plan, post
        self._algorithm = ALGORITHMS[plan.config.algorithm]
        self._ranks = post.members or tuple(range(engine.size))
        self._place = self._ranks.index(engine.rank)
        self._exchanges = MessageExchange(engine, post, self._deliver, self._snapshots, self._on_exchange_done)
        self._receive_buffer = ReceiveBuffer(engine, plan.config.max_staleness, self._sends_early)
        self._weight = 1.0
        self._step = self._before = 0
        """Steps since the last drain or cut, and before it."""
        self._base = self._longest = 0
        """Steps from the last drain to the last cut, of the rank with most at each; and since (engine thread)."""
        self._taken = self._discarded = 0
        """Messages mixed in, and received but discarded."""
        self._averagings = 0
        self._averaged_ends = 0
        """Drains that have averaged all ranks."""
        self._alone = 0
        """Mixing steps taken while no other rank was left to exchange with."""
        self._stepped = 0
        """Steps of all ranks before the last drain or cut (engine thread)."""
        self._uneven = False
        """Whether some ranks took fewer of them than others since the one before."""
        self._lasts: dict[int, int] = {}
        """Each rank's steps since the one before, by place (engine thread)."""
        self._together = True
        """Whether all ranks had the same weights when this one began, or after its last drain or cut."""
        self._staleness: Counter[int] = Counter()
        self._waited_for = [0.0] * len(self._ranks)
        self._total = 0
        """Steps of all ranks until the last drain."""
        self._all_mass = True
        """Whether all ranks that have stepped since the last drain are in this one."""
        self.keep: object = None
        self.learning_rates: Callable[[], Sequence[tuple[int, float]]] = tuple
        self.inertia: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0)
        self.sizes: Callable[[], Sequence[int]] = tuple
        self.frozen: Callable[[], Sequence[slice]] = tuple
        self.defers_sends = False
        self.log: list[Any] | None = None

    @property
    def weight(self) -> float:
        """The push-sum weight: the optimizer works on z x weight."""
        return self._weight

    @property
    def version(self) -> int:
        """Exchanges that have completed here, averages over all ranks that this rank's weights have seen (those of
        drains too), and mixing steps taken while no other rank was left to exchange with. So it grows with the steps,
        whatever the algorithm and however many ranks are left."""
        averages = 0 if self._algorithm.pairs else self._averagings  # (a pair's average is an exchange)
        return self._exchanges.completed + averages + self._averaged_ends + self._alone

    @property
    def settled(self) -> bool:
        """Whether no step was taken since the last drain or cut."""
        return self._step == 0

    @property
    def wants_before(self) -> bool:
        """Whether ``mix`` needs the weights from before the update."""
        return self._algorithm.sends_before_update

    @property
    def _sends_early(self) -> bool:
        """Whether a step's messages are sent at the end of the step before."""
        return self._algorithm.sends_before_update and self.config.local_size == 1

    def begin(self, weights: Vector) -> None:
        """Start from these weights, shape (n,), the same on all ranks, before they register; they belong to the worker.

        Args:
            weights: the model's.
        """

    def check_step(self) -> None:
        """Raise, if no step can be taken now; before one changes any weight."""
        self._registered_number()
        self._check_drained()

    @abc.abstractmethod
    def mix(self, before: Vector, after: Vector) -> Vector:
        """Mix other ranks' weights into this rank's, at the end of a step.

        Args:
            before: the biased weights before the update, shape (n,); not used unless ``wants_before``.
            after: the biased weights after the update. Both belong to the worker from now on.

        Returns:
            The model's weights z, shape (n,).
        """

    def publish(self, weights: Vector) -> None:
        """Send what later steps of other ranks mix in.

        Args:
            weights: the model's after this step's mixing, constraints and post-step hooks, shape (n,); they are not
                changed any more.
        """

    def _count_step(self) -> None:
        """Count the step that is ending."""
        self._step += 1
        is_alone = len(self._receive_buffer.finished) >= len(self._ranks) - 1
        if is_alone and self._algorithm.has_graph and (self._base + self._step) % self.config.period == 0:
            self._alone += 1

    def _into(self, place: int, step: int) -> list[tuple[int, float]]:
        """Return ``GossipPlan.in_edges`` of a step since the last drain or cut."""
        return self.plan.in_edges(place, self._base + step)

    # -- ends -------------------------------------------------------------------------------------------------

    def _counts(self) -> list[int]:
        return [self._before + self._step]

    def _is_complete(self) -> bool:
        drained = self._inbox.drained
        return drained is not None and self._exchanges.completed >= drained.rounds

    def complete_drain(self) -> None:
        """Complete a drain or cut: let the binding put ``gather``'s weights into the model, and count steps anew."""
        drained = self._take_drained()
        self._all_mass = drained.whole
        total = sum(drained.produced)
        if total != self._total or (drained.flushed and not self._together):
            self._end(drained.flushed)  # else nothing is to be done, and a rank's optimizer may be deleted by now
            self._averaged_ends += drained.flushed
        self._base = 0 if drained.flushed else self._base + self._longest
        if drained.flushed:
            self._total, self.keep = total, None
        self._before += self._step
        self._step = 0
        self._restart()
        self.engine.call_soon(self._exchanges.resume)

    def _restart(self) -> None:
        """Reset the parts that count steps since the last drain or cut."""
        self._receive_buffer.restart()

    def discard_results(self) -> None:
        """Discard messages from now on; exchanges go on for the other ranks."""
        self.keep = None
        self._receive_buffer.discard()
        self._exchanges.resume()

    @abc.abstractmethod
    def gather(self, weights: Vector, flush: bool) -> Vector:
        """Mix in all messages received, at a drain or cut; with ``flush``, average all ranks.

        Args:
            weights: z, shape (n,); it belongs to the worker from now on.
            flush: whether it is a drain. A collective then.

        Returns:
            z: the average of all ranks, or this rank's own.

        Raises:
            GradientLossError: push-sum weights do not sum to the number of ranks.
        """

    def consensus(self, x: Vector) -> Vector:
        """Return the mean over all ranks of what has been received; a collective, right after a drain or cut.

        Args:
            x: biased weights, z x ``weight``, shape (n,); they belong to the worker from now on.
        """
        total = self.sum(self._post.scalar(self._weight), "the sum of push-sum weights")
        size, weight = len(total.ranks), float(total.vector[0])
        if self._all_mass:  # else a rank whose optimizer was deleted took its share with it
            if abs(weight - size) > WEIGHT_TOLERANCE * size:
                raise GradientLossError(
                    f"{self.label}: push-sum weights of {size} ranks sum to {weight:.9g}: messages were lost or "
                    f"counted twice. This is a bug in hvd_async; please report it with stats()."
                )
            weight = size
        return self.sum(x, MEAN).vector * (1.0 / weight)

    def leave(self, weights: Vector) -> Kept:
        """Return what this rank keeps, whose model has these weights, now that the ranks will be others.

        Messages on their way are gone, and their share of the push-sum weight: each rank begins anew with weight 1.
        """
        return Kept(weights)

    # -- checkpoints ------------------------------------------------------------------------------------------

    def saved_state(self) -> SavedState | None:
        """Return the state that a checkpoint needs beside the weights after a cut; None after a drain."""
        return None if self._together else SavedState(self._weight, self._estimates(), self._base)

    def _estimates(self) -> dict[str, Vector]:
        """Return the receivers' estimates of this rank's weights, by edge."""
        return {}

    def common_state(self) -> dict[str, Vector]:
        """Return the state beside the weights that is the same on all ranks, and goes on after a drain, by name."""
        return {}

    def take_common_state(self, state: Mapping[str, Vector]) -> None:
        """Begin with what an earlier worker's ``common_state`` has returned, before ``register``."""

    def restore(self, kept: SavedState) -> None:
        """Begin with the state that an earlier run's cut saved, before ``register``."""
        self._weight = kept.weight
        self._base, self._restored, self._together = kept.base, True, False

    def stats(self) -> GossipStats:
        """Return a snapshot of the counts."""
        exchanges = self._exchanges
        return GossipStats(
            steps=self._before + self._step,
            exchanges=exchanges.completed,
            messages_sent=exchanges.sent,
            messages_taken=self._taken,
            messages_left=self._discarded,
            averagings=self._averagings,
            staleness=dict(sorted(self._staleness.items())),
            wait_s=self._wait_s,
            waited_for=tuple(self._waited_for),
            bytes_sent=exchanges.bytes_sent,
            latency_s=exchanges.seconds / exchanges.completed if exchanges.completed else 0.0,
            push_sum_weight=self._weight,
            rounds=self.version,
        )

    # -- engine thread ----------------------------------------------------------------------------------------

    def on_command(self, command: OptimizerCommand) -> None:
        match command:
            case StartExchange():
                self._exchanges.exchange(command)
            case StartAverage():
                self._averages.submit(command)
            case RankFinished(_, rank, step):
                self._receive_buffer.rank_finished(self._ranks.index(rank), step)
            case Drained():
                if not self.deleted:
                    self._exchanges.pause(command.rounds)
                known, total = self._receive_buffer.finished, command.produced[0]
                last = total - self._stepped - sum(known.values())  # all but the last rank have been announced
                self._lasts = {place: known.get(place, last) for place in range(len(self._ranks))}
                self._uneven, self._longest = len(set(self._lasts.values())) > 1, max(self._lasts.values())
                self._stepped = total
                self._receive_buffer.begin_anew(map(self._ranks.index, command.gone))
                super().on_command(command)
            case _:
                super().on_command(command)

    @abc.abstractmethod
    def _deliver(self, sender: int, key: int, weight: float, data: Vector) -> None:
        """Receive a message: its sender's place, its key there, its push-sum weight and encoded vector."""

    def _on_exchange_done(self) -> None:
        """Handle the end of an exchange, after all its messages were delivered."""

    def _snapshots(self, command: StartExchange) -> list[tuple[int, OutgoingMessage]]:
        """Return messages, with their keys, that this rank's weights of now make for an exchange (engine thread)."""
        if command.pairs or command.gathers:
            raise ReplicaStateError(f"{self.config.algorithm} averages no pairs: a bug in the coordinator")
        return []
