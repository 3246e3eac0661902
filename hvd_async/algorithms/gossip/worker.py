"""Push-sum on one rank, in any framework: SGP, OSGP, D-PSGD, and averages over all ranks ("allreduce").

The model holds z = x / w. After each local update the rank sends a share of x and w and adds what it receives, each
message times its edge's weight (``push_sum``): so the sums of x and of w over ranks and messages in flight never
change, also when messages are late, compressed, or left out because a rank has finished.

D-PSGD sends the weights from before an update, so messages are sent at the end of the step before (``publish``), and
travel while the gradient is computed; not those of the first step after a drain or cut. When all ranks have finished,
messages of a step that none of them took are discarded at both ends.

OSGP's messages travel while the next gradients are computed. Where constraints or post-step hooks change the weights,
the share is sent after them, and messages of the same step that are here already are mixed in the next step: so the
model holds what the hooks left, all messages carry such weights, and drains average them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hvd_async.algorithms.gossip import push_sum
from hvd_async.algorithms.gossip.base import GossipWorker
from hvd_async.algorithms.gossip.error_feedback import ErrorFeedback, SavedState
from hvd_async.algorithms.gossip.global_average import GlobalAverages
from hvd_async.algorithms.gossip.message_exchange import MessageFormat
from hvd_async.algorithms.gossip.messages import WaitingForMessage
from hvd_async.algorithms.gossip.plan import GossipPlan
from hvd_async.algorithms.gossip.push_sum import Message, Sent, State
from hvd_async.algorithms.gossip.receive_buffer import ReceivedMessage
from hvd_async.algorithms.gossip.sender import Sender, edge
from hvd_async.errors import ranks_text
from hvd_async.runtime.engine import Engine
from hvd_async.runtime.interfaces import Vector


class PushSumWorker(GossipWorker):
    """One optimizer of one rank that gossips by push-sum.

    Attributes:
        log: (step, [(sender, its step), ...]) of the messages received in each step.
    """

    def __init__(self, engine: Engine, plan: GossipPlan, post: MessageFormat, finish: Callable[[bool], object]) -> None:
        super().__init__(engine, plan, post, finish)
        self._averages: GlobalAverages = GlobalAverages(engine, post)
        self._known = ErrorFeedback(post, plan.config.graph)
        self._sender = Sender(engine, plan, self._place, post, self._exchanges, self._known, self._receive_buffer)
        self._early = 0
        """The step whose messages were queued before it was taken; 0 if there is none."""
        self._sent_early: Sent | None = None
        """The share that they carry, subtracted once that step is taken."""
        self._deferred = False
        """Whether ``publish`` sends this step's share."""
        self._noted: list[tuple[int, int]] = []
        """Messages received that the log does not have yet."""

    @property
    def wants_before(self) -> bool:
        return super().wants_before and not self._early

    # -- a step -----------------------------------------------------------------------------------------------

    def begin(self, weights: Vector) -> None:
        if not self._known.begun:  # weights of an earlier run's cut are each rank's own
            self._known.begin(self._post.zeros() if self._restored else weights)

    def mix(self, before: Vector, after: Vector) -> Vector:
        self.check_step()
        late, x = self.config.max_staleness > 0, before if self.wants_before else None
        state = State(after, self._weight)
        self._count_step()
        if late:
            self._announce(self._step)
        if self.plan.moves(self._base + self._step):
            # Back-pressure: at most one step's messages of this rank may be unsent, of OSGP none.
            self._await(lambda: self._sender.offered - self._exchanges.own_sent <= (0 if late else 1))
        if late:  # messages of earlier steps are added before a share is sent
            self._await_messages()
            state = self._receive(state, self._step - 1)
        averages = self.plan.averages(self._base + self._step)
        self._deferred = late and self.defers_sends and self._post.lossless and not averages
        if self._deferred:
            self._note()
            self._weight = state.w
            return push_sum.model(state, self._post.times)
        if not self._early:
            state = self._send(self._step, state.x if x is None else x, state)
        elif self._sent_early is not None:
            state = push_sum.without(state, self._sent_early, self._post.add, self._post.times)
        if self._sends_early:
            self._announce(self._step + 1)
        if not late:
            self._await_messages()
        state = self._receive(state, self._step)
        self._note()
        if averages:
            state = self._average(state)
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
        """Let the exchange of a step's messages start as soon as they are there: only others' are waited for now."""
        if self._sender.receivers(step, self._base + step):
            number = self._registered_number()
            self.engine.call_soon(lambda: self._exchanges.announce(number, step))

    def _offer(self, step: int, x: Vector, weight: float) -> Sent | None:
        return self._sender.offer(self._registered_number(), step, self._base + step, x, weight)

    def _send(self, step: int, x: Vector, state: State) -> State:
        sent = self._offer(step, x, state.w)
        return state if sent is None else push_sum.without(state, sent, self._post.add, self._post.times)

    def _await_messages(self) -> None:
        """Wait for the messages that this step needs."""

        def awaited() -> str:
            return f"messages of {ranks_text(self._ranks[place] for place in missing_now())} in step {self._step}"

        waited, missing_now = self._wait_s, self._receive_buffer.missing
        self._receive_buffer.expect(self._step, [sender for sender, _ in self._into(self._place, self._step)])
        if missing_now():
            self.engine.call_soon(self._on_exchange_done)
        while missing := missing_now():
            self._await(lambda before=missing: missing_now() != before, awaited)  # type: ignore[misc]
            for place in missing - missing_now():
                self._waited_for[place] += self._wait_s - waited
            waited = self._wait_s

    def _receive(self, state: State, until: int | None = None) -> State:
        """Return the state with messages of senders' steps up to ``until``, or all, added in one order."""
        messages = self._receive_buffer.take(until)
        state = push_sum.receive(state, self._decoded(messages), self._post.add)
        self._taken += len(messages)
        if self.log is not None:
            self._noted += [(sender, step) for sender, step, weight, _ in messages if weight]
        return state

    def _decoded(self, messages: list[ReceivedMessage]) -> Iterator[tuple[Message, float]]:
        """Yield each message that carries something, decoded, with its edge's weight."""
        for sender, step, weight, data in messages:
            self._staleness[max(0, self._step - step)] += 1
            if weight == 0.0:
                self._sender.neighbour_stopped = True
                continue
            p = dict(self._into(self._place, step))[sender]
            yield Message(self._known.decode(edge(sender, self.plan, self._base + step), data), weight), p

    def _note(self) -> None:
        """Log the messages received since the last time."""
        if self.log is not None:
            self.log.append((self._step, self._noted))
            self._noted = []

    def _average(self, state: State) -> State:
        """Return the mean of x and w over the ranks that have not finished."""
        index = self._averages.contribute(self._registered_number(), state.x, [state.w])
        self._await(lambda: self._averages.is_complete(index))
        self._averagings += 1
        x, (weight,) = self._averages.result(index)
        return State(x, weight)

    # -- ends -------------------------------------------------------------------------------------------------

    def discard_results(self) -> None:
        """Discard messages from now on; send empty ones for a step that was broken off: others count on it."""
        owed = self._step + self._sends_early if self._step else 0
        for step in range(self._sender.last + 1, owed + 1):
            self._sender.offer_nothing(self._registered_number(), step, self._base + step)
        super().discard_results()

    def _restart(self) -> None:
        self._averages.restart()
        self._sender.neighbour_stopped, self._sender.last = False, 0
        super()._restart()

    def gather(self, weights: Vector, flush: bool) -> Vector:
        self._together = flush
        discarded: list[ReceivedMessage] = []
        if self._sends_early:
            weights, discarded = self._end_early(weights)
        if flush:
            x = self._receive_rest(weights).x
            z = self.consensus(x)
            self._weight = 1.0
            self._known.begin(z)
            return z
        if self._receive_buffer.received:  # else the weights stay as they are, to the bit
            weights = push_sum.model(self._receive_rest(weights))
        self._decode_discarded(discarded)
        if self._uneven:  # which edges were left out is known at one end only: both start anew
            self._known.forget_edges()
        return weights

    def _receive_rest(self, weights: Vector) -> State:
        """Return the state of z with all messages received."""
        state = self._receive(push_sum.biased(weights, self._weight))
        self._weight = state.w
        self._note()
        return state

    def _end_early(self, weights: Vector) -> tuple[Vector, list[ReceivedMessage]]:
        """Return z without what was sent early for a step that others took, and messages of a step that none took."""
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
        """Decode messages of no step after all earlier ones on the same edges: the sender's estimate includes them."""
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

    def _deliver(self, sender: int, key: int, weight: float, data: Vector) -> None:
        self._receive_buffer.deliver(sender, key, weight, data)

    def _on_exchange_done(self) -> None:
        """If the training thread waits for a message, announce that this rank has nothing for the next exchange."""
        with self.engine.changed:
            waits = bool(self._receive_buffer.missing())
        if waits:
            self.engine.send(WaitingForMessage(self._registered_number(), self._exchanges.completed))
