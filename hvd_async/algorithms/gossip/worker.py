"""Gossip as one rank sees it, in any framework: after each local update its weights are mixed with those of others.

Every rank has biased weights x and a push-sum weight w, 1 at first; the model holds z = x / w. What a rank sends leaves
its x and w, what it takes in joins them, each times the weight that the plan gives the edge: so the sums of x and of w
over the ranks and the messages on their way never change, whatever comes late, is compressed, or stays unsent because
a rank is done. SGP and OSGP: Assran et al., ICML 2019.

D-PSGD: Lian et al., NeurIPS 2017; its w stays 1 by itself. It sends the weights before an update, so they go at the end
of the step before, and travel while the gradient is computed. (Not those of the first step after a drain or cut, nor
where hosts gossip.) When all ranks are done, messages of a step that none of them took are left aside at both ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from hvd_async.algorithms.gossip.error_feedback import ErrorFeedback, SavedState
from hvd_async.algorithms.gossip.global_average import GlobalAverages
from hvd_async.algorithms.gossip.message_exchange import MessageExchange, MessageFormat
from hvd_async.algorithms.gossip.messages import (
    GossipConfig,
    RankFinished,
    StartAverage,
    StartExchange,
    WaitingForMessage,
)
from hvd_async.algorithms.gossip.options import ALGORITHMS
from hvd_async.algorithms.gossip.plan import GossipPlan
from hvd_async.algorithms.gossip.push_sum import Sender, SentShare, edge
from hvd_async.algorithms.gossip.receive_buffer import ReceiveBuffer, ReceivedMessage
from hvd_async.errors import GradientLossError, ReplicaStateError, ranks_text
from hvd_async.runtime.engine import Engine
from hvd_async.runtime.interfaces import Vector
from hvd_async.runtime.messages import Drained, OptimizerCommand
from hvd_async.runtime.worker import Worker
from hvd_async.stats import GossipStats

WEIGHT_TOLERANCE = 1e-6
"""Relative, of the sum of push-sum weights."""


class PushSumWorker(Worker):
    """One optimizer of one rank that gossips by push-sum: SGP, OSGP, D-PSGD, or only averages ("allreduce").

    Args:
        engine: this rank's.
        plan: who sends to whom.
        post: how messages look and travel.
        finish: as ``Worker``.

    Attributes:
        keep: what must live until the next drain: other ranks count on this one's weights.
        log: where a test wants what happened to be recorded: (step, [(sender, its step), ...]) of each step.
    """

    def __init__(self, engine: Engine, plan: GossipPlan, post: MessageFormat, finish: Callable[[bool], object]) -> None:
        super().__init__(engine, plan.config, post.members, post.process_set, post.process_set_id, finish)
        self.config: GossipConfig = plan.config
        self.plan, self._post = plan, post
        self._ranks = post.members or tuple(range(engine.size))
        self._place = self._ranks.index(engine.rank)
        self._mail = MessageExchange(engine, post, self._deliver, self._snapshot, self._tell_starved)
        self._averages = GlobalAverages(engine, post)
        self._known = ErrorFeedback(post, plan.config.graph)
        self._letters = ReceiveBuffer(engine, plan.config.max_staleness, self._sends_ahead)
        self._giving = Sender(engine, plan, self._place, post, self._mail, self._known, self._letters)
        self._weight = 1.0
        self._step = self._before = 0
        """Steps since the last drain or cut, and before it."""
        self._base = self._longest = 0
        """Steps from the last drain to the last cut, of the rank with most at each; and since (engine thread)."""
        self._taken = self._aside = 0
        """Messages taken in, and left aside."""
        self._ahead = 0
        """The step whose messages were offered before it was taken; 0 if there is none."""
        self._gift: SentShare | None = None
        """What these messages take with them, once that step is taken."""
        self._averagings = 0
        self._stepped = 0
        """Steps of all ranks before the last drain or cut (engine thread)."""
        self._uneven = False
        """Whether some ranks took fewer of them than others since the one before."""
        self._together = True
        """Whether all ranks had the same weights when this one began, or after its last drain or cut."""
        self._staleness: Counter[int] = Counter()
        self._waited_for = [0.0] * len(self._ranks)
        self._total = 0
        """Steps of all ranks until the last drain."""
        self._all_mass = True
        """Whether all ranks that have stepped since the last drain are in this one."""
        self.keep: object = None
        self.log: list[Any] | None = None
        self._noted: list[tuple[int, int]] = []
        """What the log has not told yet."""

    @property
    def weight(self) -> float:
        """The push-sum weight: the optimizer works on z x weight."""
        return self._weight

    @property
    def version(self) -> int:
        """Exchanges that have landed here."""
        return self._mail.landed

    @property
    def settled(self) -> bool:
        """Whether no step was taken since the last drain or cut."""
        return self._step == 0

    @property
    def wants_before(self) -> bool:
        """Whether ``mix`` wants the weights as they were before the update: D-PSGD, if they have not gone yet."""
        return ALGORITHMS[self.config.algorithm].sends_before_update and not self._ahead

    # -- a step -----------------------------------------------------------------------------------------------

    def begin(self, weights: Vector) -> None:
        """The model's weights, shape (n,), the same on all ranks, before they meet; they belong to the worker."""
        if not self._known.begun:  # (weights of an earlier run's cut are each rank's own)
            self._known.begin(self._post.zeros() if self._restored else weights)

    def check_step(self) -> None:
        """Raise, if no step can be taken now; before one changes any weight."""
        self._opened_number()
        self._check_drained()

    def mix(self, before: Vector, after: Vector) -> Vector:
        """End a step: send, take in what has to be and what is there.

        Args:
            before: x before the update, shape (n,); not looked at unless ``wants_before``.
            after: x after the update. Both belong to the worker from now on.

        Returns:
            z, shape (n,).
        """
        self.check_step()
        late, sends_before, x = self.config.max_staleness > 0, self.wants_before, after
        self._step += 1
        if self.plan.moves(self._base + self._step):
            # (a rank that waits for nobody must not run away from what it sends; OSGP: one message an edge under way)
            self._await(lambda: self._giving.offered - self._mail.gone <= (0 if late else 1))
        if late:  # all that others have sent at earlier steps comes in before more is given away
            self._await_messages()
            x = self._take_in(x, self._step - 1)
        x = self._send(before if sends_before else x, x)
        if not late:
            self._await_messages()
        x = self._take_in(x, self._step)
        self._note()
        if self.config.average_every and (self._base + self._step) % self.config.average_every == 0:
            x = self._average(x)
        if self._sends_ahead:
            self._ahead = self._step + 1
            self._gift = self._offer(self._ahead, x)
        return x if self._weight == 1.0 else x * (1.0 / self._weight)

    @property
    def _sends_ahead(self) -> bool:
        """Whether a step's messages go at the end of the step before."""
        return ALGORITHMS[self.config.algorithm].sends_before_update and self.config.local_size == 1

    def _into(self, place: int, step: int) -> list[tuple[int, float]]:
        """As ``GossipPlan.into``, of a step since the last drain or cut."""
        return self.plan.in_edges(place, self._base + step)

    def _send(self, message: Vector, x: Vector) -> Vector:
        """Offer this step's messages, if they have not gone ahead; returns x without what is given away."""
        return self._give(x, self._gift if self._ahead else self._offer(self._step, message))

    def _give(self, x: Vector, gift: SentShare | None) -> Vector:
        """x without what has been given away."""
        if gift is None:
            return x
        self._weight -= gift.share * gift.weight
        # (the message must stay as it is until it has gone: x may share its memory)
        return x * (1.0 - gift.share) if gift.x is x else self._post.add(x, gift.x, -gift.share)

    def _offer(self, step: int, message: Vector) -> SentShare | None:
        return self._giving.offer(self._opened_number(), step, self._base + step, message, self._weight)

    def _await_messages(self) -> None:
        def told() -> str:
            return f"messages of {ranks_text(self._ranks[place] for place in missing_now())} in step {self._step}"

        waited, missing_now = self._wait_s, self._letters.missing
        self._letters.expect(self._step, [sender for sender, _ in self._into(self._place, self._step)])
        if missing_now():
            self.engine.call_soon(self._tell_starved)
        while missing := missing_now():
            self._await(lambda before=missing: missing_now() != before, told)  # type: ignore[misc]
            for place in missing - missing_now():
                self._waited_for[place] += self._wait_s - waited
            waited = self._wait_s

    def _take_in(self, x: Vector, until: int | None = None) -> Vector:
        """Mix in what has come, in one order: of senders' steps up to ``until``, or all."""
        messages = self._letters.take(until)
        for sender, step, weight, data in messages:
            self._staleness[max(0, self._step - step)] += 1
            if weight == 0.0:
                self._giving.short = True
                continue
            p = dict(self._into(self._place, step))[sender]
            x = self._post.add(x, self._known.decode(edge(sender, self.plan, self._base + step), data), p)
            self._weight += p * weight
        self._taken += len(messages)
        if self.log is not None:
            self._noted += [(sender, step) for sender, step, weight, _ in messages if weight]
        return x

    def _note(self) -> None:
        """Record what was taken in since the last time."""
        if self.log is not None:
            self.log.append((self._step, self._noted))
            self._noted = []

    def _average(self, x: Vector) -> Vector:
        """The mean of x and w over the ranks that are not done."""
        index = self._averages.bring(self._opened_number(), x, self._weight)
        self._await(lambda: self._averages.come(index))
        self._averagings += 1
        x, self._weight = self._averages.take(index)
        return x

    # -- ends -------------------------------------------------------------------------------------------------

    def _counts(self) -> list[int]:
        return [self._before + self._step]

    def _whole(self) -> bool:
        """Whether all ranks are done, and all that was sent is here."""
        drained = self._inbox.drained
        return drained is not None and self._mail.landed >= drained.rounds

    @property
    def has_available(self) -> bool:
        return self._inbox.refused is not None or self._whole()

    def apply_available(self) -> bool:
        """Nothing to do but wait: messages are taken in at the end."""
        self._check_refused()
        return self._whole()

    def complete_drain(self) -> None:
        """All ranks are done, and all messages are here: let the binding put ``gather``'s weights into the model."""
        drained = self._take_drained()
        self._all_mass = drained.whole
        total = sum(drained.produced)
        if total != self._total or (drained.flushed and not self._together):
            self._end(drained.flushed)  # (else nothing is to be done, and a rank's optimizer may be gone by now)
        self._base = 0 if drained.flushed else self._base + self._longest
        if drained.flushed:
            self._total, self.keep = total, None
        self._before += self._step
        self._step = 0
        self._averages.restart()
        self._giving.short = False
        self._letters.restart()
        self.engine.call_soon(self._mail.resume)

    def discard_results(self) -> None:
        """Messages that come from now on are mixed into nothing; exchanges go on for the other ranks."""
        self.keep = None
        self._letters.discard()
        self._mail.resume()

    def gather(self, weights: Vector, flush: bool) -> Vector:
        """In a drain or cut, after all messages have come: take them in; with ``flush``, average all ranks.

        Args:
            weights: z, shape (n,); it belongs to the worker from now on.
            flush: whether it is a drain. A collective then.

        Returns:
            z: the average of all ranks, or this rank's own.

        Raises:
            GradientLossError: push-sum weights do not sum to the number of ranks.
        """
        self._together = flush
        left: list[ReceivedMessage] = []
        if self._sends_ahead:
            weights, left = self._end_ahead(weights)
        if not flush:
            if self._letters.come:  # (else the weights stay as they are, to the bit)
                x = self._take_in(weights * self._weight)
                self._note()
                weights = x * (1.0 / self._weight)
            self._leave_aside(left)
            if self._uneven:  # which edges were left out is known at one end only: both start anew
                self._known.forget_edges()
            return weights
        x = self._take_in(weights * self._weight)
        self._note()
        z = self.consensus(x)
        self._weight = 1.0
        self._known.begin(z)
        return z

    def _end_ahead(self, weights: Vector) -> tuple[Vector, list[ReceivedMessage]]:
        """Subtract from z what went ahead for a step that others took; also returns messages of a step none took."""
        if self._ahead and self._ahead <= self._longest:
            x = self._give(weights * self._weight, self._gift)
            weights = x * (1.0 / self._weight)
        self._ahead, self._gift = 0, None
        left = self._letters.take_after(self._longest)
        self._aside += len(left)
        return weights, left

    def _leave_aside(self, left: list[ReceivedMessage]) -> None:
        """Decode, after all that came before on the same edges, what is for no step: its sender counts on that."""
        for sender, step, weight, data in left:
            if weight:
                self._known.decode(edge(sender, self.plan, self._base + step), data)

    def consensus(self, x: Vector) -> Vector:
        """The mean over all ranks of what has been taken in; a collective, right after a drain or cut.

        Args:
            x: biased weights, z x ``weight``, shape (n,); they belong to the worker from now on.
        """
        total = self.sum(self._post.scalar(self._weight), "the sum of push-sum weights")
        size, weight = len(total.ranks), float(total.vector[0])
        if not self._all_mass:  # a rank that was discarded took its share with it
            return self.sum(x, "the average of all ranks").vector * (1.0 / weight)
        if abs(weight - size) > WEIGHT_TOLERANCE * size:
            raise GradientLossError(
                f"{self.label}: push-sum weights of {size} ranks sum to {weight:.9g}: messages were lost or counted "
                f"twice. This is a bug in hvd_async; please report it with stats()."
            )
        return self.sum(x, "the average of all ranks").vector * (1.0 / size)

    # -- checkpoints ------------------------------------------------------------------------------------------

    def kept(self) -> SavedState | None:
        """What a checkpoint needs beside the weights, after a cut; None after a drain: nothing."""
        return None if self._together else SavedState(self._weight, self._known.kept(), self._base)

    def restore(self, kept: SavedState) -> None:
        """Begin with what an earlier run's cut has left (before ``open``)."""
        self._known.restore(kept.copies)
        self._weight = kept.weight
        self._base, self._restored, self._together = kept.base, True, False

    def stats(self) -> GossipStats:
        """A snapshot."""
        mail = self._mail
        return GossipStats(
            steps=self._before + self._step,
            exchanges=mail.landed,
            messages_sent=mail.sent,
            messages_taken=self._taken,
            messages_left=self._aside,
            averagings=self._averagings,
            staleness=dict(sorted(self._staleness.items())),
            wait_s=self._wait_s,
            waited_for=tuple(self._waited_for),
            bytes_sent=mail.bytes_sent,
            latency_s=mail.seconds / mail.landed if mail.landed else 0.0,
            push_sum_weight=self._weight,
        )

    # -- engine thread ----------------------------------------------------------------------------------------

    def on_command(self, command: OptimizerCommand) -> None:
        match command:
            case StartExchange():
                self._mail.exchange(command)
            case StartAverage():
                self._averages.submit(command)
            case RankFinished(_, rank, step):
                self._letters.retire(self._ranks.index(rank), step)
            case Drained():
                if not self.deleted:
                    self._mail.pause(command.rounds)
                known, total = list(self._letters.retired.values()), command.produced[0]
                steps = {*known, total - self._stepped - sum(known)}  # (all but the last have retired)
                self._uneven, self._longest, self._stepped = len(steps) > 1, max(steps), total
                self._letters.begin_anew(map(self._ranks.index, command.gone))
                super().on_command(command)
            case _:
                super().on_command(command)

    def _deliver(self, sender: int, key: int, weight: float, data: Vector) -> None:
        self._letters.deliver(sender, key, weight, data)

    def _tell_starved(self) -> None:
        """If the training thread waits for a message, say that this rank has nothing for the next exchange."""
        with self.engine.changed:
            starved = bool(self._letters.missing())
        if starved:
            self.engine.send(WaitingForMessage(self._opened_number(), self._mail.landed))

    def _snapshot(self, partner: int, round_: int) -> Vector:
        raise ReplicaStateError(f"{self.config.algorithm} averages no pairs: a bug in the coordinator")
