"""A gossiping rank, independent of the framework: sent and received messages, push-sum, ends and checkpoints.

``GossipWorker`` counts steps, exchanges and ends, but mixes nothing. ``PushSumWorker`` is push-sum: SGP, OSGP, D-PSGD,
and averages over all ranks ("allreduce"). Other algorithms derive from one of these, each in its own file.

The model holds z = x / w. After each local update the rank sends a share of x and w, and adds each message that it
receives times its edge's weight (``push_sum``). So the sums of x and of w over ranks and messages in flight never
change, also when messages are late, compressed, or omitted because a rank has finished.

D-PSGD sends the weights from before an update, so messages are sent at the end of the previous step (``publish``), and
are in flight while the gradient is computed. The first step after a drain or cut is an exception. When all ranks have
finished, messages of a step that no rank took are discarded at both ends.

OSGP's messages are in flight while the next gradients are computed. If constraints or post-step hooks change the
weights, the share is sent after them, and messages of the same step that have already arrived are mixed in the next
step. So the model holds the weights that the hooks leave, all messages carry such weights, and drains average them.
"""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

from hvd_async.algorithms.gossip import push_sum
from hvd_async.algorithms.gossip.averages import Averages
from hvd_async.algorithms.gossip.config import (
    ALGORITHMS,
    NAMES_IN_RING,
    ExchangeDone,
    GossipConfig,
    MessageComing,
    MessageQueued,
    NoMessage,
    RankFinished,
    StartAverage,
    StartExchange,
    WaitingForMessage,
)
from hvd_async.algorithms.gossip.error_feedback import ErrorFeedback, SavedState
from hvd_async.algorithms.gossip.message_format import HEADER, MessageFormat, OutgoingMessage
from hvd_async.algorithms.gossip.plan import GossipPlan
from hvd_async.algorithms.gossip.push_sum import Message, Sent, State
from hvd_async.algorithms.option import confirms
from hvd_async.algorithms.own_weights import Kept, WeightWorker
from hvd_async.errors import GradientLossError, ReplicaStateError, ranks_text
from hvd_async.runtime.carrier import Carrier, Collective
from hvd_async.runtime.interfaces import Handle, Program, RankRuntime, Take, Vector, Wait
from hvd_async.runtime.protocol import Drained, OptimizerCommand
from hvd_async.stats import GossipStats

# -- exchanges: one alltoall of all ranks each (engine thread) ---------------------------------------------------------


class _QueuedStep(NamedTuple):
    messages: list[OutgoingMessage]
    weight: float


class Links(NamedTuple):
    """Receivers and senders of messages with one key, on one rank; known on all ranks before messages are queued.

    Attributes:
        receivers: places to which this rank sends a message.
        senders: places that send a message to this rank.
        rows: number of rows per message.
    """

    receivers: Sequence[int]
    senders: Sequence[int]
    rows: int = 1


class _Due(NamedTuple):
    """A commanded exchange, with the number of rows of queued messages to and from each place."""

    command: StartExchange
    to: list[int]
    coming: list[int]
    keys: list[tuple[int, int]]
    """Places and keys of the queued messages that come."""


NO_MESSAGE = HEADER.pack(-1, 0.0)
"""The header of rows that replace an omitted message."""


class MessageExchange:
    """Exchanges of one optimizer on this rank.

    Both ends of a message know its size from the command and ``links``, so ranks need not communicate sizes first. If
    the sender omits a message because its receiver has finished, it sends empty rows instead.

    Args:
        engine: the engine of this rank.
        post: the format of messages.
        links: returns the links of a key. Called when an exchange's command arrives: all ranks receive commands in the
            same order, so all answer in the same state.
        deliver: called with the sender's place, the key, its push-sum weight and the encoded vector of each message;
            instead of the vector with a ``Row`` if the exchange is not complete.
        snapshots: returns the messages, with their keys, that an exchange makes of this rank's current weights
            (AD-PSGD); the receiver sends a message of the same size in return.
        after: called when all messages of an exchange were delivered.
        early: whether messages are delivered as soon as they can be used in the order of the device's stream.

    Attributes:
        brought: number of exchanges whose messages were delivered.
    """

    def __init__(
        self,
        engine: RankRuntime,
        post: MessageFormat,
        links: Callable[[int], Links],
        deliver: Callable[[int, int, float, Any], None],
        snapshots: Callable[[StartExchange], list[tuple[int, OutgoingMessage]]],
        after: Callable[[], None],
        early: bool = False,
    ) -> None:
        self._engine, self._post, self._links = engine, post, links
        self._deliver, self._snapshots, self._after, self._early = deliver, snapshots, after, early
        self._ranks = post.members or tuple(range(engine.size))
        self._place = {rank: place for place, rank in enumerate(self._ranks)}
        self._outbox: dict[int, _QueuedStep] = {}
        self._coming: set[int] = set()
        """Steps whose messages were announced but not queued yet."""
        self._due: list[StartExchange] = []
        """Commanded exchanges that have not started."""
        self.carrier = Carrier(engine)
        self.own_sent = 0
        """Number of delivered exchanges that carried queued messages of this rank."""
        self.sent = self.bytes_sent = 0
        self._started = self.brought = 0

    @property
    def is_busy(self) -> bool:
        """Whether an exchange has started whose messages were not delivered yet."""
        return self._started > self.brought

    def announce(self, optimizer: int, key: int) -> None:
        """Announce that messages of a step, or none, will be queued once messages of earlier steps have arrived.

        Not if collectives must start in order: the exchange would hold up what brings those messages.
        """
        if self._engine.collectives.in_order:
            return
        self._coming.add(key)
        self._engine.send(MessageComing(optimizer, key))

    def offer(self, optimizer: int, key: int, messages: list[OutgoingMessage], weight: float) -> None:
        """Queue a step's messages, one per receiver, for an exchange; if empty, announce that there are none."""
        if messages or key in self._coming:
            self._outbox[key] = _QueuedStep(messages, weight)
        self._coming.discard(key)
        if any(key in command.keys_of(self._engine.rank) for command in self._due):
            self.carrier.advance()
        else:
            self._engine.send(MessageQueued(optimizer, key, weight) if messages else NoMessage(optimizer, key))

    def exchange(self, command: StartExchange) -> None:
        """Submit this rank's part of an exchange."""
        to, coming = [0] * len(self._ranks), [0] * len(self._ranks)
        keys: list[tuple[int, int]] = []
        for first, last, key in command.senders:
            links = self._links(key)
            if first <= self._engine.rank <= last:
                for place in links.receivers:
                    to[place] += links.rows
            for place in links.senders:
                if first <= self._ranks[place] <= last:
                    coming[place] += links.rows
                    keys.append((place, key))
        name = f"hvd_async.gossip.{command.optimizer}.{command.round % NAMES_IN_RING}"
        prepare = partial(self._prepare, _Due(command, to, coming, keys), name)
        self._due.append(command)
        self.carrier.carry("", command.round, name, prepare, lambda: self._may_start(command))

    def _may_start(self, command: StartExchange) -> bool:
        """Return whether this rank's announced messages are queued, and what the exchange gathers is here."""
        if any(key in self._coming for key in command.keys_of(self._engine.rank)):
            return False
        return not (command.gathers and self.carrier.is_busy)

    def _pieces(self, data: Vector) -> list[Vector]:
        """Split a message into the data of its rows, each of which gets its header."""
        step = max(1, self._post.nbytes)
        if len(data) <= step:
            return [data]
        return [data[start : start + step] for start in range(0, max(1, len(data)), step)]

    def _prepare(self, due: _Due, name: str) -> Collective:
        """Pack this rank's messages for an exchange, and return it."""
        command, splits, coming, keys = due
        own = self._engine.rank
        self._started += 1
        self._due.remove(command)
        outgoing = [(key, message, 1.0) for key, message in self._snapshots(command)]
        for _, (to, data, _), _ in outgoing:
            splits[to] += len(self._pieces(data))
            coming[to] += len(self._pieces(data))
        queued = False
        for key in command.keys_of(own):
            messages, weight = self._outbox.pop(key)
            queued = bool(messages)
            outgoing += [(key, message, weight) for message in messages]
        self.sent += len(outgoing)
        rows: list[tuple[int, Vector, bytes]] = []
        for key, (to, data, own_weight), weight in outgoing:
            header = HEADER.pack(key, weight if own_weight is None else own_weight)
            rows += [(to, piece, header) for piece in self._pieces(data)]
        left_out = list(splits)
        for to, _, _ in rows:
            left_out[to] -= 1
        nothing = self._post.as_bytes(self._post.scalar(0.0))[:0] if any(left_out) else None
        rows += [(to, nothing, NO_MESSAGE) for to, count in enumerate(left_out) for _ in range(count)]
        if len(rows) > sum(splits):
            raise ReplicaStateError(f"{name} has messages to ranks that expect none: a bug in hvd_async")
        rows.sort(key=lambda row: row[0])
        packed = self._post.pack([(data, header) for _, data, header in rows])
        self.bytes_sent += len(rows) * (self._post.nbytes + HEADER.size)
        first = next((self._place[rank] for rank, *_ in [*command.senders, *command.pairs]), None)

        def usable(take: Take) -> None:
            rows, weights = cache(take), {(rank, key): weight for rank, key, weight in command.weights}
            for at, (place, key) in enumerate(sorted(keys, key=lambda message: message[0])):
                weight = weights.get((self._ranks[place], key), 1.0)
                self._deliver(place, key, weight, Row(self._post, rows, at))
            delivered(any(place == first for place, _ in keys), complete=False)
            self._after()
            with self._engine.changed:
                self._engine.changed.notify_all()

        def settled(received: Any) -> None:
            if is_early:
                report(any(place == first for place, _ in keys))
                return
            messages: dict[tuple[int, bytes], list[Vector]] = {}
            senders = [place for place, count in enumerate(coming) for _ in range(count)]
            for row, place in zip(received, senders, strict=True):
                data, header = self._post.unpack(row)
                if header != NO_MESSAGE:
                    messages.setdefault((place, header), []).append(data)
            for (place, header), pieces in messages.items():
                key, weight = HEADER.unpack(header)
                self._deliver(place, key, weight, pieces[0] if len(pieces) == 1 else self._post.concatenate(pieces))
            delivered(any(first == place for place, _ in messages))

        def delivered(of_first: bool, complete: bool = True) -> None:
            self.own_sent += queued
            self.brought += 1
            report(of_first, complete)

        def report(of_first: bool, complete: bool = True) -> None:
            # The receiver of the first sender's message reports completion: a sender's part may complete as soon as the
            # kernel has buffered it, so exchanges would seem to take no time. (If the first sender had announced a
            # message but queued none, it reports completion itself.)
            if of_first or (first == self._place[own] and command.senders and not queued):
                self._engine.send(ExchangeDone(command.optimizer, command.round, complete))

        is_early = False

        def start() -> Handle:
            nonlocal is_early
            post = self._post
            handle = self._engine.collectives.alltoall(packed, splits, coming, name, post.process_set, post.room())
            is_early = self._early and handle.take is not None
            return handle

        return Collective(start, settled, usable if self._early else None, after=self._after)


# -- messages received -------------------------------------------------------------------------------------------------
# The engine delivers messages, the training thread takes them.


class Row:
    """A message in an exchange that may not be complete (training thread).

    Args:
        post: the format of messages.
        rows: returns the exchange's rows, to be used in the order of the device's stream.
        at: the number of the message's row.
    """

    def __init__(self, post: MessageFormat, rows: Take, at: int) -> None:
        self._post, self._rows, self._at = post, rows, at

    def data(self) -> Vector:
        """Return the encoded vector."""
        return self._rows()[self._at][: self._post.nbytes]

    def is_omitted(self) -> bool:
        """Return whether the sender has omitted the message, since this rank has finished; waits for the device."""
        return self._post.unpack(self._rows()[self._at])[1] == NO_MESSAGE


class ReceivedMessage(NamedTuple):
    """A received message.

    Attributes:
        sender: the sender's place.
        step: the sender's step.
        weight: push-sum weight; 0 for an empty message.
        data: the encoded vector.
    """

    sender: int
    step: int
    weight: float
    data: Vector


class ReceiveBuffer:
    """Messages that one optimizer has received.

    Args:
        engine: the engine of this rank.
        late: steps that a message may be late.
        sent_early: whether a step's messages are sent at the end of the previous step, also by a rank that finishes
            there.

    Attributes:
        received: pending messages: (push-sum weight, encoded vector or ``Row``) by (sender's place, its step).
        finished: the last step of each rank that has finished, by place.
    """

    def __init__(self, engine: RankRuntime, late: int, sent_early: bool) -> None:
        self._engine, self._late, self._sent_early = engine, late, sent_early
        self.received: dict[tuple[int, int], tuple[float, Any]] = {}
        self.finished: dict[int, int] = {}
        self._expected: set[tuple[int, int]] = set()
        """Messages that steps so far need and that were not taken yet. The engine may read the set concurrently, so it
        is replaced, never changed."""
        self._step = 0
        self._discards = False

    # -- engine thread ----------------------------------------------------------------------------------------

    def deliver(self, sender: int, step: int, weight: float, data: Any) -> None:
        """Add a message; a waiting thread is notified when all messages of its exchange were delivered."""
        with self._engine.changed:
            if not self._discards:
                self.received[sender, step] = (weight, data)

    def discard(self) -> None:
        """Drop all messages from now on."""
        with self._engine.changed:
            self._discards = True
            self.received.clear()

    def rank_finished(self, place: int, step: int) -> None:
        """Record that a rank has finished, after ``step`` steps."""
        with self._engine.changed:
            self.finished[place] = step
            self._engine.changed.notify_all()

    def reset(self, gone: Iterable[int]) -> None:
        """Start after a drain or cut: all ranks are active except the ``gone`` (by place), to which no messages may be
        sent."""
        with self._engine.changed:
            self.finished = dict.fromkeys(gone, 0)

    # -- both -------------------------------------------------------------------------------------------------

    def last(self, place: int, step: int) -> int:
        """Return the last step in which a rank sends or receives messages; ``step`` if it is active."""
        if place not in self.finished:
            return step
        last = self.finished[place]
        return last + 1 if last and self._sent_early else last

    def missing(self) -> set[int]:
        """Return the ranks (by place) whose messages the current step still waits for."""
        latest = self._step - self._late
        return {
            sender
            for sender, step in self._expected
            if step <= latest and (sender, step) not in self.received and step <= self.last(sender, step)
        }

    # -- training thread --------------------------------------------------------------------------------------

    def expect(self, step: int, senders: Iterable[int]) -> None:
        """Begin a step that needs messages of that step from these ranks."""
        self._step = step
        self._expected = self._expected | {(sender, step) for sender in senders}

    def take(self, until: int | None) -> list[ReceivedMessage]:
        """Take the messages of senders' steps up to ``until`` (None: all), in a fixed order."""
        with self._engine.changed:  # else the engine might count a message just taken as missing
            found = self._pop(lambda step: until is None or step <= until)
            left = self._expected.difference((message.sender, message.step) for message in found)
            self._expected = {(sender, step) for sender, step in left if step <= self.last(sender, step)}
        return _there(found)

    def take_after(self, last: int) -> list[ReceivedMessage]:
        """Take the messages of steps after ``last``, at an end."""
        with self._engine.changed:
            found = self._pop(lambda step: step > last)
        return _there(found, is_end=True)

    def _pop(self, wanted: Callable[[int], bool]) -> list[ReceivedMessage]:
        keys = sorted(key for key in self.received if wanted(key[1]))
        return [ReceivedMessage(*key, *self.received.pop(key)) for key in keys]

    def restart(self) -> None:
        """Restart the count of steps; no messages are expected."""
        self._step, self._expected = 0, set()


def _there(messages: list[ReceivedMessage], is_end: bool = False) -> list[ReceivedMessage]:
    """Return messages with their data, at an end without omitted ones."""
    rows = [each for each in messages if not (is_end and isinstance(each.data, Row) and each.data.is_omitted())]
    return [each._replace(data=each.data.data()) if isinstance(each.data, Row) else each for each in rows]


# -- the base of all gossiping ranks -----------------------------------------------------------------------------------


WEIGHT_TOLERANCE = 1e-6
"""Relative tolerance of the sum of push-sum weights."""
MEAN = "the average of all ranks"
"""Name, in error messages, of the collective in which ranks sum their weights."""


class GossipWorker(WeightWorker):
    """A gossiping optimizer on one rank: steps, exchanges and ends. Subclasses mix the weights.

    Args:
        engine: the engine of this rank.
        plan: the edges of each step.
        post: the format of messages.
        finish: as in ``Worker``.

    Attributes:
        learning_rates: returns (elements, rate) of consecutive parts of the weights, with the learning rate of this
            step; always the same parts. Empty: the rate is unknown and does not change.
        inertia: returns how an update depends on learning rates of earlier steps; see ``WeightReplica.inertia``.
        sizes: returns the number of elements of each parameter, in the order of the vector of weights.
        frozen: returns the elements of parameters that are currently frozen on this rank.
        moving: returns for each parameter whether the update of this step moves it.
    """

    _averages: Averages
    """Averages over all ranks, if the algorithm has any between ends."""

    def __init__(
        self, engine: RankRuntime, plan: GossipPlan, post: MessageFormat, finish: Callable[[bool], object]
    ) -> None:
        super().__init__(engine, plan.config, post.members, post.process_set, post.process_set_id, finish)
        self.config: GossipConfig = plan.config
        self.plan, self._post = plan, post
        self._algorithm = ALGORITHMS[plan.config.algorithm]
        self._ranks = post.members or tuple(range(engine.size))
        self._place = self._ranks.index(engine.rank)
        self._host, self._own = divmod(self._place, plan.config.local_size)
        """This rank's host, and its place there; without hosts each rank is a host of its own."""
        early = plan.config.local_size == 1 and not self._algorithm.pairs and not confirms()
        self._exchanges = MessageExchange(
            engine, post, self._links, self._deliver, self._snapshots, self._on_exchange_done, early
        )
        self._carrier = self._exchanges.carrier
        self._receive_buffer = ReceiveBuffer(engine, plan.config.max_staleness, self._sends_early)
        self._weight = 1.0
        self._base = self._longest = 0
        """Steps from the last drain to the last cut, summed over cuts, of the rank with the most steps at each; and the
        same number for the end that is under way (engine thread)."""
        self._base_of_exchanges = 0
        """``_base`` of the exchanges that are commanded now (engine thread): the training thread may be behind."""
        self._left: frozenset[int] = frozenset()
        """Places of ranks whose optimizer was deleted before the last end (engine thread)."""
        self._taken = self._discarded = 0
        """Messages mixed in, and messages received but discarded."""
        self._averagings = 0
        self._averaged_ends = 0
        """Number of drains that have averaged all ranks."""
        self._alone = 0
        """Mixing steps taken while no other rank was left to exchange with."""
        self._stepped = 0
        """Steps of all ranks before the last drain or cut (engine thread)."""
        self._uneven = False
        """Whether ranks took different numbers of steps between the last two ends."""
        self._lasts: dict[int, int] = {}
        """Steps of each rank between the last two ends, by place (engine thread)."""
        self._together = True
        """Whether all ranks had the same weights at the start, or after the last drain or cut."""
        self._staleness: Counter[int] = Counter()
        self._waited_for = [0.0] * len(self._ranks)
        self._total = 0
        """Steps of all ranks until the last drain."""
        self._all_mass = True
        """Whether all ranks that have stepped since the last drain take part in this one."""
        self.learning_rates: Callable[[], Sequence[tuple[int, float]]] = tuple
        self.inertia: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0)
        self.sizes: Callable[[], Sequence[int]] = tuple
        self.frozen: Callable[[], Sequence[slice]] = tuple
        self.moving: Callable[[], Sequence[bool]] = lambda: [True] * len(self.sizes())

    @property
    def weight(self) -> float:
        """The push-sum weight: the optimizer works on z x weight."""
        return self._weight

    @property
    def version(self) -> int:
        """A number that grows with the steps, for any algorithm and number of active ranks.

        It counts the exchanges that have completed here, the averages over all ranks that this rank has applied (also
        those of drains), and the mixing steps without another active rank.
        """
        averages = 0 if self._algorithm.pairs else self._averagings  # (a pair's average is an exchange)
        return self._exchanges.carrier.completed + averages + self._averaged_ends + self._alone

    @property
    def wants_before(self) -> bool:
        """Whether ``mix`` needs the weights from before the update."""
        return self._algorithm.sends_before_update

    @property
    def _sends_early(self) -> bool:
        """Whether a step's messages are sent at the end of the previous step."""
        return self._algorithm.sends_before_update and self.config.local_size == 1

    def begin(self, weights: Vector) -> None:
        """Start from the model's weights, before ``register``.

        Args:
            weights: shape (n,), the same on all ranks; the worker takes ownership.
        """

    def check_step(self) -> None:
        """Raise if no step can be taken now; called before a step changes any weight."""
        if self._number is None or self.in_consensus or self._announced:
            self._check_drained()

    def mix(self, before: Vector, after: Vector) -> Vector:
        """Mix other ranks' weights into this rank's, at the end of a step.

        Args:
            before: the biased weights before the update, shape (n,); not used unless ``wants_before``.
            after: the biased weights after the update. The worker takes ownership of both.

        Returns:
            The model's weights z, shape (n,).
        """
        return self.run(self.mix_program(before, after))

    @abc.abstractmethod
    def mix_program(self, before: Vector, after: Vector) -> Program[Vector]:
        """Program of ``mix``."""

    def publish(self, weights: Vector) -> None:
        """Send the weights that other ranks mix in their later steps.

        Args:
            weights: the model's weights after this step's mixing, constraints and post-step hooks, shape (n,); they
                must not change afterwards.
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

    def _ranks_of(self, host: int) -> range:
        """Return the places of a host's ranks."""
        size = self.config.local_size
        return range(host * size, (host + 1) * size)

    # -- ends -------------------------------------------------------------------------------------------------

    def _is_complete(self) -> bool:
        drained = self._drained
        return drained is not None and self._exchanges.carrier.completed >= drained.rounds

    def complete_drain_program(self) -> Program[None]:
        """Complete a drain or cut: the binding loads the weights of ``gather`` into the model, and the count of steps
        restarts."""
        drained = self._take_drained()
        self._all_mass = drained.whole
        total = sum(drained.produced)
        if total != self._total or (drained.flushed and not self._together):
            # (otherwise there is nothing to do, and the optimizer may have been deleted)
            yield from self._finish(drained.flushed)
            self._averaged_ends += drained.flushed
        self._base = 0 if drained.flushed else self._base + self._longest
        if drained.flushed:
            self._total = total
        self._restart()
        self._continue()

    def _restart(self) -> None:
        """Reset the parts that count steps since the last drain or cut."""
        self._receive_buffer.restart()

    def discard_results(self) -> None:
        """Discard messages from now on; exchanges continue for the other ranks."""
        self._receive_buffer.discard()
        super().discard_results()

    def consensus_program(self, x: Vector) -> Program[Vector]:
        """Return the mean of all ranks' weights, given this rank's biased ones.

        Raises:
            GradientLossError: push-sum weights do not sum to the number of ranks.
        """
        total = yield from self.sum_program(self._post.scalar(self._weight), "the sum of push-sum weights")
        size, weight = len(total.ranks), float(total.vector[0])
        if self._all_mass:  # otherwise the share of a rank whose optimizer was deleted is lost
            if abs(weight - size) > WEIGHT_TOLERANCE * size:
                raise GradientLossError(
                    f"{self.label}: push-sum weights of {size} ranks sum to {weight:.9g}: messages were lost or "
                    f"counted twice. This is a bug in hvd_async; please report it with stats()."
                )
            weight = size
        return (yield from self.sum_program(x, MEAN)).vector * (1.0 / weight)

    def leave(self, weights: Vector) -> Kept:
        """Return the state that this rank keeps over a membership change; its model has these weights.

        Messages in flight are lost, with their share of the push-sum weight: each rank restarts with weight 1.
        """
        return Kept(weights)

    # -- checkpoints ------------------------------------------------------------------------------------------

    def saved_state(self) -> SavedState | None:
        """Return the state, other than the weights, that a checkpoint needs after a cut; None after a drain."""
        return None if self._together else SavedState(self._weight, self._estimates(), self._base)

    def _estimates(self) -> dict[str, Vector]:
        """Return the receivers' estimates of this rank's weights, by edge."""
        return {}

    def common_state(self) -> dict[str, Vector]:
        """Return the state, by name, that is the same on all ranks and outlives a drain, without the weights."""
        return {}

    def take_common_state(self, state: Mapping[str, Vector]) -> None:
        """Start from the result of an earlier worker's ``common_state``, before ``register``."""

    def restore(self, kept: SavedState) -> None:
        """Start from the state that an earlier run saved after a cut, before ``register``."""
        self._weight = kept.weight
        self._base = self._base_of_exchanges = kept.base
        self._restored, self._together = True, False

    def stats(self) -> GossipStats:
        """Return a snapshot of the counts."""
        exchanges = self._exchanges
        return GossipStats(
            steps=self._before + self._step,
            exchanges=exchanges.carrier.completed,
            messages_sent=exchanges.sent,
            messages_taken=self._taken,
            messages_left=self._discarded,
            averagings=self._averagings,
            staleness=dict(sorted(self._staleness.items())),
            wait_s=self._wait_s,
            waited_for=tuple(self._waited_for),
            bytes_sent=exchanges.bytes_sent,
            latency_s=exchanges.carrier.mean_seconds,
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
                known, total = self._receive_buffer.finished, command.produced[0]
                last = total - self._stepped - sum(known.values())  # all but the last rank have been announced
                self._lasts = {place: known.get(place, last) for place in range(len(self._ranks))}
                self._uneven, self._longest = len(set(self._lasts.values())) > 1, max(self._lasts.values())
                self._stepped = total
                self._base_of_exchanges = 0 if command.flushed else self._base_of_exchanges + self._longest
                self._left = frozenset(map(self._ranks.index, command.gone))
                self._receive_buffer.reset(self._left)
                super().on_command(command)
            case _:
                super().on_command(command)

    def _links(self, key: int) -> Links:
        """Return the links of a key, in exchanges that are commanded now."""
        if self._place in self._left:
            return Links((), ())
        phase = self._base_of_exchanges + key
        receivers = [place for place, _ in self.plan.out_edges(self._place, phase) if place not in self._left]
        return Links(receivers, [place for place, _ in self.plan.in_edges(self._place, phase)])

    def _deliver(self, sender: int, key: int, weight: float, data: Any) -> None:
        """Receive a message: its sender's place, the sender's key, the push-sum weight and the encoded vector, or its
        ``Row``."""
        raise ReplicaStateError(f"{self.config.algorithm} sends no messages to neighbours: a bug in the coordinator")

    def _on_exchange_done(self) -> None:
        """Handle the end of an exchange, after all its messages were delivered."""

    def _snapshots(self, command: StartExchange) -> list[tuple[int, OutgoingMessage]]:
        """Return the messages, with keys, that an exchange makes of this rank's current weights (engine thread)."""
        if command.pairs or command.gathers:
            raise ReplicaStateError(f"{self.config.algorithm} does not average pairs: a bug in the coordinator")
        return []


def check_weight(kept: SavedState, algorithm: str) -> None:
    """Check that a state saved after a cut has push-sum weight 1.

    Raises:
        ValueError: it has not; only push-sum supports other weights.
    """
    if kept.weight != 1.0:
        raise ValueError(
            f"this state was saved after cut(), with push-sum weight {kept.weight:.6g}, which {algorithm} does not "
            f"support: continue with the algorithm that it was saved with, or save after drain()"
        )


# -- push-sum ----------------------------------------------------------------------------------------------------------


def edge(end: int | str, plan: GossipPlan, phase: int) -> str:
    """Return the name of an edge's estimate; ``end`` is the sender's place, or "out" at the sender itself."""
    return f"{end} {plan.phase(phase)}"


class PushSumWorker(GossipWorker):
    """Push-sum on one rank: SGP, OSGP, D-PSGD, and averages over all ranks.

    Attributes:
        log: (step, [(sender, its step), ...]) of the messages mixed in each step.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._averages = Averages(self.engine, self._post, blocking=True)
        self._known = ErrorFeedback(self._post, self.plan.config.graph, self.plan.config.local_size)
        self._offered = self._last_offered = 0
        """Number of steps whose messages were queued; and the last step whose messages were queued, or that has none,
        since the last drain or cut."""
        self._has_stopped_neighbour = False
        """Whether an empty message was received since the last drain or cut: its sender keeps its weights."""
        self.can_be_late = self.plan.config.local_size == 1 and not self.engine.elastic
        self._good: State | None = None
        """Finite weights that other ranks get if this rank's are not, while it is not known yet; None if they never
        are unknown."""
        self._early = 0
        """The step whose messages were queued before it was taken; 0 if there is none."""
        self._sent_early: Sent | None = None
        """The share that these messages carry, subtracted once that step is taken."""
        self._deferred = False
        """Whether ``publish`` sends this step's share."""
        self._noted: list[tuple[int, int]] = []
        """Received messages that are not in the log yet."""

    @property
    def wants_before(self) -> bool:
        return super().wants_before and not self._early

    # -- a step -----------------------------------------------------------------------------------------------

    def begin(self, weights: Vector) -> None:
        self._good = State(weights, 1.0) if self.flags_late else None
        if not self._known.begun:  # weights of an earlier run's cut are each rank's own
            self._known.begin(self._post.zeros() if self._restored else weights)

    def mix_program(self, before: Vector, after: Vector) -> Program[Vector]:
        self.check_step()
        late, x = self.config.max_staleness > 0, before if self.wants_before else None
        state = State(after, self._weight)
        self._count_step()
        if late:
            self._announce(self._step)
        if self.plan.moves(self._base + self._step):
            # Back-pressure: messages of at most one step of this rank may be unsent, with OSGP of none.
            yield Wait(lambda: self._offered - self._exchanges.own_sent <= (0 if late else 1))
        if late:  # messages of earlier steps are added before a share is sent
            yield from self._await_messages()
            state = self._receive(state, self._step - 1)
        averages = self.plan.averages(self._base + self._step)
        self._deferred = late and self.defers_sends and self._post.lossless and not averages
        if self._deferred:
            self._note_received()
            self._weight = state.w
            return push_sum.model(state, self._post.times)
        if not self._early:
            state = self._send(self._step, state.x if x is None else x, state)
        elif self._sent_early is not None:
            state = push_sum.without(state, self._sent_early, self._post.add, self._post.times)
        if self._sends_early:
            self._announce(self._step + 1)
        if not late:
            yield from self._await_messages()
        state = self._receive(state, self._step)
        self._note_received()
        if averages:
            x, (weight,) = yield from self._average(state.x, [state.w])
            state = State(x, weight)
        self._weight = state.w
        return push_sum.model(state, self._post.times)

    def publish(self, weights: Vector) -> None:
        if self._deferred:
            self._deferred = False
            sent = self._offer(self._step, self._post.times(weights, self._weight), self._weight)
            self._weight -= 0.0 if sent is None else sent.p * sent.message.w
        elif self._sends_early:
            self._early, w = self._step + 1, self._weight
            self._sent_early = self._offer(self._early, weights if w == 1.0 else self._post.times(weights, w), w)

    def _announce(self, step: int) -> None:
        """Announce a step's messages, so that their exchange starts as soon as they are queued: this rank waits only
        for messages of other ranks."""
        if self._receivers(step):
            number = self.number
            self.engine.call_soon(lambda: self._exchanges.announce(number, step))

    def _receivers(self, step: int) -> list[tuple[int, float]]:
        """Return the places to which this rank sends in a step, with the edges' weights, without finished ranks."""
        edges = self.plan.out_edges(self._place, self._base + step)
        return [(to, p) for to, p in edges if step <= self._receive_buffer.last(to, step)]

    def _gets_less(self, step: int) -> bool:
        """Return whether this rank may receive less than it sends."""
        senders = self.plan.senders(self._place)  # of all phases: it may send in this one, and receive in none
        last = self._receive_buffer.last
        return self._has_stopped_neighbour or any(step > last(sender, step) for sender in senders)

    def _offer(self, step: int, x: Vector, weight: float) -> Sent | None:
        """Queue a step's messages, if it is a sending step; return the share that they carry, None if there is none.

        Args:
            step: the step since the last drain or cut.
            x: the biased weights to send, shape (n,); they must not change until they are sent.
            weight: this rank's push-sum weight.
        """
        self._last_offered = step
        if not self.plan.moves(self._base + step):
            return None
        out, number = self._receivers(step), self.number
        sent, data = None, None
        if out and not push_sum.may_send(weight, self._gets_less(step)):
            data, weight = self._post.encode(self._post.zeros()), 0.0
        elif out:
            data, decoded = self._known.encode(edge("out", self.plan, self._base + step), self._finite(x, weight))
            sent = Sent(Message(x if self._post.lossless else decoded, weight), sum(p for _, p in out))
        if out:
            self._post.mark(data)
        messages = [OutgoingMessage(to, data) for to, _ in out]
        self._offered += bool(messages)
        self.engine.call_soon(lambda: self._exchanges.offer(number, step, messages, weight))
        return sent

    def _finite(self, x: Vector, weight: float) -> Vector:
        """Return x, or the finite weights sent last if x is not finite. Only the device knows which, so that a message
        leaves at once, as do the push-sum weights, whose sum stays the same."""
        if self.flag is None or self._good is None:
            return x
        last, w = self._good
        x = self.flag.choose(x, last if w == weight else self._post.times(last, weight / w))
        self._good = State(x, weight)
        return x

    def _send(self, step: int, x: Vector, state: State) -> State:
        sent = self._offer(step, x, state.w)
        return state if sent is None else push_sum.without(state, sent, self._post.add, self._post.times)

    def _await_messages(self) -> Program[None]:
        """Wait for the messages that this step needs."""

        def awaited() -> str:
            return f"messages of {ranks_text(self._ranks[place] for place in missing_now())} in step {self._step}"

        waited, missing_now = self._wait_s, self._receive_buffer.missing
        self._receive_buffer.expect(self._step, [sender for sender, _ in self._into(self._place, self._step)])
        if missing_now() and not self._exchanges.is_busy:  # (otherwise it is called at the end of the exchange)
            self.engine.call_soon(self._on_exchange_done)
        while missing := missing_now():
            yield Wait(lambda before=missing: missing_now() != before, awaited)  # type: ignore[misc]
            for place in missing - missing_now():
                self._waited_for[place] += self._wait_s - waited
            waited = self._wait_s

    def _receive(self, state: State, until: int | None = None) -> State:
        """Return the state with messages of senders' steps up to ``until`` (None: all, at an end) added, in a fixed
        order."""
        buffer = self._receive_buffer
        messages = buffer.take_after(0) if until is None else buffer.take(until)
        state = push_sum.receive(state, self._decoded(messages), self._post.add)
        self._taken += len(messages)
        if self.log is not None:
            self._noted += [(sender, step) for sender, step, weight, _ in messages if weight]
        return state

    def _decoded(self, messages: list[ReceivedMessage]) -> Iterator[tuple[Message, float]]:
        """Yield each non-empty message, decoded, with its edge's weight."""
        for sender, step, weight, data in messages:
            self._staleness[max(0, self._step - step)] += 1
            if weight == 0.0:
                self._has_stopped_neighbour = True
                continue
            p = dict(self._into(self._place, step))[sender]
            yield Message(self._known.decode(edge(sender, self.plan, self._base + step), data), weight), p

    def _note_received(self) -> None:
        """Log the messages received since the last call, if there is a log."""
        if self.log is not None:
            self.log.append((self._step, self._noted))
            self._noted = []

    def _average(self, x: Vector, weights: list[float]) -> Program[tuple[Vector, list[float]]]:
        """Return the mean of x and of each push-sum weight over the ranks that have not finished."""
        good, average = self._good, self._averages.newest + 1
        self._averages.contribute(self.number, average, 0, self._finite(x, weights[0]), weights)
        yield Wait(lambda: self._averages.is_complete(average))
        self._averagings += 1
        x, weights, _ = self._averages.take(average)
        self._good = good and State(x, weights[0])  # (the sum was written over what was sent)
        return x, weights

    # -- ends -------------------------------------------------------------------------------------------------

    def discard_results(self) -> None:
        """Discard messages from now on; send empty messages for a step that was interrupted, since other ranks wait for
        them."""
        last = self._step + self._sends_early if self._step else 0
        for step in range(self._last_offered + 1, last + 1):
            empty = self._post.encode(self._post.zeros())
            messages = [OutgoingMessage(to, empty) for to, _ in self._receivers(step)]
            self._exchanges.offer(self.number, step, messages, 0.0)
        super().discard_results()

    def _restart(self) -> None:
        self._averages.restart(0)
        self._has_stopped_neighbour, self._last_offered = False, 0
        super()._restart()

    def gather_program(self, weights: Vector, flush: bool) -> Program[Vector]:
        self._together = flush
        discarded: list[ReceivedMessage] = []
        if self._sends_early:
            weights, discarded = self._end_early(weights)
        if flush:
            x = self._receive_rest(weights).x
            z = yield from self.consensus_program(x)
            self._weight = 1.0
            self._known.begin(z)
            return z
        if self._receive_buffer.received:  # otherwise the weights do not change, to the bit
            weights = push_sum.model(self._receive_rest(weights))
        self._decode_discarded(discarded)
        if self._uneven:  # only one end knows which edges were omitted: both restart from the common estimate
            self._known.forget_edges()
        return weights

    def _receive_rest(self, weights: Vector) -> State:
        """Return the state of z after mixing in all received messages."""
        state = self._receive(push_sum.biased(weights, self._weight))
        self._weight = state.w
        self._note_received()
        return state

    def _end_early(self, weights: Vector) -> tuple[Vector, list[ReceivedMessage]]:
        """Return z without the share sent early for a step that others took, and messages of a step no rank took."""
        if self._early and self._early <= self._longest:
            state = push_sum.biased(weights, self._weight)
            if self._sent_early is not None:
                state = push_sum.without(state, self._sent_early, self._post.add, self._post.times)
            self._weight, weights = state.w, push_sum.model(state)
        self._early, self._sent_early = 0, None
        discarded = self._receive_buffer.take_after(self._longest)
        self._discarded += len(discarded)
        return weights, discarded

    def _decode_discarded(self, discarded: list[ReceivedMessage]) -> None:
        """Decode discarded messages, after all earlier messages on their edges: the sender's estimate includes them."""
        for sender, step, weight, data in discarded:
            if weight:
                self._known.decode(edge(sender, self.plan, self._base + step), data)

    # -- checkpoints ------------------------------------------------------------------------------------------

    def _estimates(self) -> dict[str, Vector]:
        return self._known.saved_state()

    def restore(self, kept: SavedState) -> None:
        self._known.restore(kept.copies)
        super().restore(kept)

    # -- engine thread ----------------------------------------------------------------------------------------

    def _deliver(self, sender: int, key: int, weight: float, data: Any) -> None:
        self._receive_buffer.deliver(sender, key, weight, data)

    def _on_exchange_done(self) -> None:
        """If the training thread waits for a message that no exchange in flight may bring, announce that this rank has
        nothing for the next one."""
        with self.engine.changed:
            waits = bool(self._receive_buffer.missing()) and not self._exchanges.is_busy
        if waits:
            self.engine.send(WaitingForMessage(self.number, self._exchanges.brought))


# -- averages with neighbours that take the same step ------------------------------------------------------------------
# The common base of exact diffusion and NoLoCo. A message of a step that only one end of an edge has taken counts at
# neither end, so push-sum weights stay 1.


class NeighbourAverageWorker(PushSumWorker):
    """Averages with neighbours on a symmetric graph, on one rank."""

    def _exchanged(self, vector: Vector) -> Program[tuple[Vector, dict[int, Vector]]]:
        """Send a vector to this step's neighbours, and wait for their vectors.

        Args:
            vector: shape (n,); it must not change until it is sent.

        Returns:
            The vector as its receivers decode it, and the vectors of the neighbours that take this step, by place.
        """
        yield Wait(lambda: self._offered - self._exchanges.own_sent <= 1)
        sent = self._offer(self._step, vector, 1.0)
        yield from self._await_messages()
        messages = self._receive_buffer.take(self._step)
        self._taken += len(messages)
        self._staleness[0] += len(messages)
        phase, there = self._base + self._step, [message for message in messages if message.weight]
        if self.log is not None:
            self._noted += [(message.sender, self._step) for message in there]
        others = {each.sender: self._known.decode(edge(each.sender, self.plan, phase), each.data) for each in there}
        return vector if sent is None else sent.message.x, others

    # -- ends -------------------------------------------------------------------------------------------------

    def gather_program(self, weights: Vector, flush: bool) -> Program[Vector]:
        self._together = flush
        self._discarded += len(self._receive_buffer.take_after(0))  # of steps that this rank has not taken
        if flush:
            weights = yield from self.consensus_program(weights)
            self._known.begin(weights)
        elif self._uneven:
            self._known.forget_edges()
        return weights

    # -- checkpoints ------------------------------------------------------------------------------------------

    def restore(self, kept: SavedState) -> None:
        check_weight(kept, self.config.algorithm)
        super().restore(kept)
