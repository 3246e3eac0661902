"""The sender's side of a step of push-sum: whom this rank sends to, what a message encodes, when it sends nothing."""

from __future__ import annotations

from hvd_async.algorithms.gossip import push_sum
from hvd_async.algorithms.gossip.error_feedback import ErrorFeedback
from hvd_async.algorithms.gossip.message_exchange import MessageExchange, MessageFormat, OutgoingMessage
from hvd_async.algorithms.gossip.plan import GossipPlan
from hvd_async.algorithms.gossip.push_sum import Message, Sent
from hvd_async.algorithms.gossip.receive_buffer import ReceiveBuffer
from hvd_async.runtime.engine import Engine
from hvd_async.runtime.interfaces import Vector


class Sender:
    """One optimizer's, on the training thread.

    Args:
        engine: this rank's.
        plan: edges of each step.
        place: this rank's.
        post: the format of messages.
        exchanges: carries them.
        known: the receivers' estimates, where messages are differences.
        receive_buffer: messages of other ranks, and the last steps of those that have finished.

    Attributes:
        offered: steps of which messages were queued, ever.
        last: the last step whose messages were queued, or that has none, since the last drain or cut.
        neighbour_stopped: whether an empty message was received since the last drain or cut: its sender keeps what it
            has.
    """

    def __init__(
        self,
        engine: Engine,
        plan: GossipPlan,
        place: int,
        post: MessageFormat,
        exchanges: MessageExchange,
        known: ErrorFeedback,
        receive_buffer: ReceiveBuffer,
    ) -> None:
        self._engine, self._plan, self._place, self._post = engine, plan, place, post
        self._exchanges, self._known, self._receive_buffer = exchanges, known, receive_buffer
        self.offered = self.last = 0
        self.neighbour_stopped = False

    def offer(self, optimizer: int, step: int, phase: int, x: Vector, weight: float) -> Sent | None:
        """Queue a step's messages, if any rank has some then; return the share that they carry, None without one.

        Args:
            optimizer: its number.
            step: since the last drain or cut.
            phase: the number, from 1, of the step whose edges these are.
            x: the biased weights to send, shape (n,); they must stay as they are until they are sent.
            weight: this rank's push-sum weight.
        """
        self.last = step
        if not self._plan.moves(phase):
            return None
        out = self.receivers(step, phase)
        sent, data = None, None
        if out and not push_sum.may_send(weight, self._gets_less(step)):
            data, weight = self._post.encode(self._post.zeros()), 0.0
        elif out:
            data, decoded = self._known.encode(edge("out", self._plan, phase), x)
            sent = Sent(Message(decoded, weight), sum(p for _, p in out))
        messages = [OutgoingMessage(to, data) for to, _ in out]
        self.offered += bool(messages)
        self._engine.call_soon(lambda: self._exchanges.offer(optimizer, step, messages, weight))
        return sent

    def offer_nothing(self, optimizer: int, step: int, phase: int) -> None:
        """Queue empty messages of a step that was broken off before it had any: others wait (engine thread)."""
        empty = self._post.encode(self._post.zeros())
        messages = [OutgoingMessage(to, empty) for to, _ in self.receivers(step, phase)]
        self._exchanges.offer(optimizer, step, messages, 0.0)

    def receivers(self, step: int, phase: int) -> list[tuple[int, float]]:
        """Return the places to which this rank sends in a step, as far as is known, with the edges' weights."""
        edges = self._plan.out_edges(self._place, phase)
        return [(to, p) for to, p in edges if step <= self._receive_buffer.last(to, step)]

    def _gets_less(self, step: int) -> bool:
        """Return whether this rank cannot count on receiving as much as it sends."""
        senders = self._plan.senders(self._place)  # of all phases: it may send in this one, and receive in none
        return self.neighbour_stopped or any(step > self._receive_buffer.last(sender, step) for sender in senders)


def edge(end: int | str, plan: GossipPlan, phase: int) -> str:
    """Return the name of an edge's estimate: by its sender's place, or "out" at the sender itself."""
    return f"{end} {plan.phase(phase)}"
