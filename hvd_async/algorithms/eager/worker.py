"""Eager-SGD as one rank sees it, in any framework: hand gradients over, get rounds back, apply each exactly once.

The training thread calls ``connect``, ``hand_over``, ``step`` and ``drain``; the engine thread carries out the
coordinator's commands. Li et al., PPoPP 2020, with the promises of partial allreduce that it left open.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future

from hvd_async.algorithms.eager.counters import Counters
from hvd_async.algorithms.eager.gradient_format import GradientFormat, PendingGradient, ReducedRound
from hvd_async.algorithms.eager.hand_over import HandedOver, HandOver, entered, ready
from hvd_async.algorithms.eager.messages import (
    EagerConfig,
    EndStep,
    ExplainRound,
    ReportReceived,
    RoundsReceived,
    SetHyperparameters,
    StartRound,
    VersionTaken,
)
from hvd_async.algorithms.eager.remains import Remains
from hvd_async.algorithms.eager.round_inbox import RoundInbox
from hvd_async.algorithms.eager.rounds_in_flight import RoundsInFlight
from hvd_async.errors import ReplicaStateError
from hvd_async.runtime.engine import Engine
from hvd_async.runtime.interfaces import Vector
from hvd_async.runtime.log import warn
from hvd_async.runtime.messages import Drained, Hyper, OptimizerCommand
from hvd_async.runtime.uninterrupted import Uninterrupted
from hvd_async.runtime.worker import Worker
from hvd_async.stats import Stats

Apply = Callable[[ReducedRound], None]


class EagerWorker(Worker):
    """One optimizer of one rank.

    Args:
        engine: this rank's.
        config: the same on all ranks.
        wire: how the binding's vectors look and travel.
        finish: called at the end of each drain (True) or cut (False), when all rounds are applied.
        apply: applies a round that comes while this rank drains.
        emptied: the buckets of the vectors handed over since the last call that have turned out to hold no gradient.

    Attributes:
        version: rounds this rank's weights have seen.
    """

    _inbox: RoundInbox

    def __init__(
        self,
        engine: Engine,
        config: EagerConfig,
        wire: GradientFormat,
        finish: Callable[[bool], object],
        apply: Apply = lambda round_: None,
        emptied: Callable[[], Sequence[int]] = tuple,
    ) -> None:
        inbox = RoundInbox(engine.changed)
        super().__init__(engine, config, wire.members, wire.process_set, wire.process_set_id, finish, inbox)
        self.config, self.wire, self.apply, self._emptied = config, wire, apply, emptied
        ranks = wire.members or range(engine.size)
        self._counters = Counters(ranks)
        self._host = ranks.index(engine.rank) // config.local_size if config.local_size > 1 else None
        self._in_flight = RoundsInFlight(engine, wire, inbox.deliver, self._counters, self._host)
        self._records_timeline = self._in_flight.timeline is not None
        # Training thread's:
        self._steps = self._base = 0  # steps in all, and round number minus step number, which ends re-base
        self._hand_over = HandOver(wire.nbytes, self._counters)
        self._half_applied = False
        self.whole = Uninterrupted()
        self.version = 0
        self.ledger = self._hand_over.ledger
        self._settled_at = 0  # steps at the last drain or cut
        self._ended = 0  # steps that all ranks of this one's host have handed over, as far as this one has waited for
        self.mend: int | None = None
        """The rank whose weights all took over at the last drain or cut, as it was shown most rounds; or None."""

    # -- where it stands -----------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether a step may be begun: no step and no drain has been broken off (Ctrl-C, HVD_ASYNC_TIMEOUT)."""
        return self._inbox.agreed and not self._announced and not self._broken_off and self.whole.fine

    @property
    def _behind(self) -> int:
        """Rounds that its steps have brought and its weights have not seen."""
        return self._steps + self._base - self.version

    @property
    def _broken_off(self) -> bool:
        """Whether its last step was not waited for to its end."""
        return self._behind > 0 or (self._host is not None and self._ended < self._steps)

    @property
    def gone(self) -> frozenset[int]:
        """Buckets of the step that is under way that have been handed over."""
        return frozenset(self._hand_over.handed)

    @property
    def settled(self) -> bool:
        """Whether no step was taken, and no gradient handed over, since the last drain or cut."""
        return self._steps == self._settled_at and not self._hand_over.handed

    def _check_able(self) -> None:
        """Raise, if this rank can neither hand over nor apply. (An elastic one keeps what comes after a loss, too.)"""
        self.whole.check()
        if not self.engine.elastic:
            self.engine.check()
        self._check_drained()

    def _post(self, action: Callable[[], None], hurry: bool = True) -> None:
        """Run ``action`` on the engine thread. If the engine has ended since ``_check_able``, threads that wait for the
        action get the error, and ``remains`` takes the gradients."""
        self.engine.notify(action, hurry)

    # -- stepping (training thread) ---------------------------------------------------------------------------

    def hand_over(self, bucket: int, vector: Vector | None) -> None:
        """Hand over a bucket of the step that is under way, before ``step``; any thread may, one at a time.

        Args:
            bucket: one that this step has not handed over yet.
            vector: it belongs to the worker from now on; None if it must count as no gradient (NaN, an overflow).
        """
        number = self._registered_number()
        self._check_able()
        self._hand_over.check_new(bucket)
        with self.whole(f"bucket {bucket} could not be handed over"):
            self._hand_over.give(bucket, vector, self.version, step := self._steps + 1 + self._base)
            self._post(lambda: self._arrive(number, step), hurry=False)

    def step(self, vectors: Mapping[int, Vector | None], hyper: Hyper, apply: Apply | None = None) -> int:
        """Finish the step, apply its rounds as the start or ``apply`` says, and return their number."""
        rounds = self.finish_step(vectors, hyper)
        count = len(rounds)
        self._apply_all(rounds, apply or self.apply)
        return count

    def finish_step(
        self, vectors: Mapping[int, Vector | None], hyper: Hyper, most: int | None = None
    ) -> list[ReducedRound]:
        """Hand over what is left of this step, wait for its round, and return the rounds that are waiting.

        After a step that was broken off (Ctrl-C, HVD_ASYNC_TIMEOUT) this ends that one. What it is given is the same
        gradient again, or one of weights that lack a round: it is left out, for no gradient counts twice, and none may
        be later than was agreed.

        Args:
            vectors: by bucket, those that ``hand_over`` has not had; they belong to the worker from now on.
            hyper: what the round is applied with if this rank leads it.
            most: return no more rounds than this, though more may wait (user code sees one round at a time).

        Returns:
            Rounds in order, to be applied one after the other, each in ``applying``; none if this step's round was
            applied before.
        """
        number = self._registered_number()
        self._check_able()
        if most is not None and self._host is not None and self.config.pace == "rounds":
            raise ReplicaStateError(
                "synchronize() takes one round a step, and with hierarchical= and pace='rounds' a host's ranks skip "
                "rounds together: do what you do after it in round_transform="
            )
        if self._broken_off:
            warn(f"rank {self.engine.rank}: the last step was broken off. This one ends it and brings no gradient")
        else:
            self._hand_over.check_whole(vectors)
            with self.whole("a step could not be handed over"):
                self._hand_in(number, vectors, hyper)
        self._await(lambda: len(self._inbox.ready) >= self._behind and self._host_has_ended(most))
        with self.whole("a step could not be ended"):
            self._ended = self._steps
            self.ledger.take_back(self._emptied())
            rounds = self._inbox.waiting(most if self._host is None else self._most(most))
            if self.config.pace == "rounds":
                taken = VersionTaken(number, self.version + len(rounds))
                self._base = taken.version - self._steps
                self.engine.call_soon(lambda: self.engine.send(taken))
        return rounds

    def _host_has_ended(self, most: int | None) -> bool:
        """Whether the other ranks of the host have handed this step over, and all rounds are here that belong to it."""
        if self._host is None:
            return True
        whole = self._inbox.whole >= self._steps - self._settled_at
        return whole and len(self._inbox.ready) >= self._most(most)

    def _most(self, most: int | None) -> int:
        """Return how many rounds this step takes: as many as its host's other ranks, which go on with equal weights."""
        own = max(0, self._inbox.ends_at - self.version)
        return own if most is None else min(own, most)

    def _hand_in(self, number: int, vectors: Mapping[int, Vector | None], hyper: Hyper) -> None:
        """Hand over what is left of this step."""
        step = self._steps + 1 + self._base
        for bucket, vector in vectors.items():
            self._hand_over.give(bucket, vector, self.version, step, in_step=True)
        self._in_flight.forget_cut()
        self._steps += 1
        self._hand_over.end_step()
        told, self._told = None if hyper == self._told else hyper, hyper
        self._post(lambda: self._enter(number, step, told))

    # -- applying rounds (training thread) --------------------------------------------------------------------

    def _apply_all(self, rounds: list[ReducedRound], apply: Apply) -> None:
        rounds.reverse()
        while rounds:  # a round that is applied need not be kept while the others are
            with self.applying(rounds[-1]):
                apply(rounds.pop())

    @contextlib.contextmanager
    def applying(self, round_: ReducedRound) -> Iterator[None]:
        """Around the application of the round that is next: afterwards it counts as applied."""
        self.begin(round_)
        try:
            yield
        except BaseException as error:
            self.whole.fail(error)
            raise
        self.end()

    def begin(self, round_: ReducedRound) -> None:
        """Begin to apply a round, as ``applying`` does where it can be a block of code. ``end`` follows."""
        self.whole.begin(f"round {round_.index} could not be applied")
        self._half_applied = True

    def end(self) -> None:
        """The round that is next has been applied."""
        round_ = self._inbox.take()
        if self._in_flight.timeline is not None:
            self._in_flight.timeline.applied(self._registered_number(), round_.index, time.monotonic())
        self.version = round_.index
        self.ledger.apply(round_)
        self._counters.add_held_bytes(-sum(self.wire.nbytes))
        self._half_applied = False
        self.whole.end()

    # -- draining (training thread) ---------------------------------------------------------------------------

    def check_finished(self, flush: bool) -> None:
        """Raise, if this rank cannot finish now.

        Inside ``consensus()`` it can: that begins with a drain, so one of another optimizer has nothing to do here.

        Raises:
            ReplicaStateError: gradients of a step have been handed over, and ``step`` did not follow; or something was
                broken off half-way.
        """
        self.whole.check()
        if self._hand_over.handed:
            raise ReplicaStateError(
                f"{self.label}: backward() has handed gradients over and no step() has followed: call "
                f"optimizer.step() before this, or optimizer.discard() if it is to train no more"
            )

    def _counts(self) -> list[int]:
        self.ledger.take_back(self._emptied())
        return list(self.ledger.produced)

    def _is_complete(self) -> bool:
        return self._inbox.complete(self.version)

    @property
    def has_available(self) -> bool:
        return super().has_available or self._inbox.has_round()

    def apply_available(self) -> bool:
        self._check_refused()
        self.whole.check()
        self._apply_all(self._inbox.waiting(), self.apply)
        return super().apply_available()

    def announce_finished(self, flush: bool) -> None:
        """Announce that this rank has finished: at the process's end also between backward() and step()."""
        if self._hand_over.handed:
            warn(
                f"rank {self.engine.rank} ends after backward() without step(): {self.label} gives the gradients that "
                f"were handed over to the last round"
            )
        if not self._announced:
            self.engine.check()
            with self.whole("a drain could not be begun"):
                super().announce_finished(flush)
            if flush:
                self.wire.release()

    def complete_drain(self) -> None:
        """All ranks are done: re-base the counters, check that no gradient was lost (GradientLossError), and let the
        binding end it."""
        with self.whole("a drain could not be ended"):
            drained = self._take_drained()
            self._settled_at, self._ended, self.shown, self.mend = self._steps, self._steps, 0, drained.mend
            self._base = drained.rounds - self._steps
            self.ledger.note_drained(drained)
        self.ledger.check_drained(drained, self.engine.rank)
        self._end(drained.flushed)

    def discard_results(self) -> None:
        self._inbox.discard()

    # -- checkpoints (training thread) ------------------------------------------------------------------------

    def pending(self) -> list[PendingGradient]:
        """Return gradients that no round has carried yet, by bucket; complete after a cut."""
        if self._in_flight.at_cut is not None and self.settled:
            return self._in_flight.at_cut
        if self.engine.replaced and self.settled:  # it was shut down, and drained before
            return [PendingGradient(None, [])] * self.config.buckets
        found: Future[list[PendingGradient]] = Future()

        def look() -> None:
            found.set_result(self._in_flight.pending())
            with self.engine.changed:
                self.engine.changed.notify_all()

        self.engine.call_soon(look)
        self.engine.wait(found.done)
        return found.result()

    def restore(self, held: list[PendingGradient]) -> None:
        """Begin with an earlier run's pending gradients, before ``connect``; versions as they were at its cut."""
        self._in_flight.restore(held)
        self._restored = max((len(versions) for _, versions in held), default=0)
        for bucket, (_, versions) in enumerate(held):
            self.ledger.restore(bucket, len(versions))

    # -- elastic training (training thread) ---------------------------------------------------------------------

    def remains(self) -> Remains:
        """Apply the rounds that have come, and return what is in none of them; after the engine's end."""
        fit, ended = not self._half_applied, self._steps - self._broken_off  # (as user code has seen it)
        if fit:
            self.whole = Uninterrupted()  # (all that was handed over is here)
            self._apply_all(list(self._inbox.ready), self.apply)
        self._in_flight.take_in(self._hand_over.take_rest())
        self.ledger.take_back(self._emptied())
        step = self._hand_over
        return Remains(
            version=self.version,
            in_rounds=self._in_flight.unfinished(),
            pending=self._in_flight.pending(),
            begun=self._steps + step.all_brought,
            ended=ended,
            handed=frozenset() if step.all_brought else step.brought | step.handed,
            fit=fit,
            tail=self.wire.tail,
        )

    def take_over(self, remains: Remains) -> None:
        """Begin with gradients of before a reset, before ``connect``; versions from that of now as 0."""
        self.restore(remains.pending_in(self.wire))
        self._hand_over.brought = remains.brought

    def stats(self) -> Stats:
        return self._counters.stats(steps=self._steps, rounds=self.version, wait_s=self._wait_s, **self.ledger.stats())

    # -- engine thread ----------------------------------------------------------------------------------------

    def _arrive(self, number: int, step: int) -> None:
        if taken := self._taken(step, in_step=False):
            self.engine.send(ready(number, taken, self._in_flight.complete))

    def _enter(self, number: int, step: int, told: Hyper | None) -> None:
        self.engine.send(entered(number, step, told, self._taken(step, in_step=True), self._in_flight.complete))

    def _taken(self, step: int, in_step: bool) -> list[HandedOver]:
        for one in (taken := self._hand_over.take(step, in_step)):
            self._in_flight.arrive(one.bucket, one.vector, one.version)
        return taken

    def on_command(self, command: OptimizerCommand) -> None:
        """Carry out a command."""
        match command:
            case StartRound() | ExplainRound():
                self._in_flight.go(command)
            case EndStep(_, host, steps, version):
                if host == self._host:
                    self._in_flight.end_step(steps)
                    self._inbox.end_step(steps, version)
            case SetHyperparameters(_, round_, hyper):
                self._in_flight.settle(round_, hyper)
            case ReportReceived():
                self.engine.send(RoundsReceived(command.optimizer, command.call, list(self._in_flight.landed)))
            case Drained():
                self._in_flight.end()
                self._inbox.end(command.rounds)
                self._in_flight.forget_cut()
                if not command.flushed:
                    self._in_flight.keep_for_cut()
        super().on_command(command)
