"""What a rank gives away by push-sum: with each message a share of its weights and of its push-sum weight."""

from __future__ import annotations

from typing import NamedTuple

from hvd_async.algorithms.gossip.error_feedback import ErrorFeedback
from hvd_async.algorithms.gossip.message_exchange import MessageExchange, MessageFormat, OutgoingMessage
from hvd_async.algorithms.gossip.plan import GossipPlan
from hvd_async.algorithms.gossip.receive_buffer import ReceiveBuffer
from hvd_async.runtime.engine import Engine
from hvd_async.runtime.interfaces import Vector

MIN_WEIGHT = 0.75
"""Push-sum weight below which a rank gives nothing away where senders to it are done, or have nothing to give: it would
go on with ever less, and z = x / w would run away. It sends empty messages then, of weight 0."""


class SentShare(NamedTuple):
    """What a step's messages take with them.

    Attributes:
        x: as the receivers decode it.
        share: of x and of the push-sum weight, given away in all.
        weight: that this share is of.
    """

    x: Vector
    share: float
    weight: float


class Sender:
    """One optimizer's, on the training thread.

    Args:
        engine: this rank's.
        plan: who sends to whom.
        place: this rank's.
        post: how messages look.
        mail: where they go.
        known: what their receivers know.
        letters: what other ranks send.

    Attributes:
        offered: steps of which messages were offered, ever.
        short: whether an empty message has come since the last drain or cut.
    """

    def __init__(
        self,
        engine: Engine,
        plan: GossipPlan,
        place: int,
        post: MessageFormat,
        mail: MessageExchange,
        known: ErrorFeedback,
        letters: ReceiveBuffer,
    ) -> None:
        self._engine, self._plan, self._place, self._post = engine, plan, place, post
        self._mail, self._known, self._letters = mail, known, letters
        self.offered = 0
        self.short = False

    def offer(self, optimizer: int, step: int, phase: int, message: Vector, weight: float) -> SentShare | None:
        """Offer a step's messages, if any rank has some then; None if they take nothing with them.

        Args:
            step: since the last drain or cut.
            phase: the number, from 1, of the step whose edges these are.
            message: what is sent, shape (n,); it must stay as it is until it has gone.
            weight: this rank's push-sum weight.
        """
        if not self._plan.moves(phase):
            return None
        out = [(to, p) for to, p in self._plan.out_edges(self._place, phase) if step <= self._letters.last(to, step)]
        gift, data = None, None
        if out and weight < MIN_WEIGHT and self._is_short(step):
            data, weight = self._post.encode(self._post.zeros()), 0.0
        elif out:
            data, sent = self._known.encode(edge("out", self._plan, phase), message)
            gift = SentShare(sent, sum(p for _, p in out), weight)
        letters = [OutgoingMessage(to, data) for to, _ in out]
        self.offered += bool(letters)
        self._engine.call_soon(lambda: self._mail.offer(optimizer, step, letters, weight))
        return gift

    def _is_short(self, step: int) -> bool:
        """Whether this rank cannot count on getting back what it gives."""
        senders = self._plan.senders(self._place)  # (also of other phases: it may give in this one, and get in none)
        return self.short or any(step > self._letters.last(sender, step) for sender in senders)


def edge(end: int | str, plan: GossipPlan, phase: int) -> str:
    """The name of what a sender is known by ("out": this rank itself)."""
    return f"{end} {plan.phase(phase)}"
