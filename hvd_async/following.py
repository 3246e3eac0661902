"""LSGD and EASGD as one rank sees them: it trains by itself and is pulled towards a leader, or a centre, now and then.

The engine takes part in pulls whatever the training thread does: it gives a snapshot of the weights as they were after
the last step, and keeps what comes. The training thread takes that up at its next step, and waits for nobody.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hvd_async import leaders
from hvd_async.engine import Engine
from hvd_async.events import Command, Drained, Iterated, Landed, LeaderConfig, Pull
from hvd_async.leaders import LossWindow, Strength
from hvd_async.mail import Post
from hvd_async.protocols import Vector
from hvd_async.pulls import ALL, CENTRE
from hvd_async.stats import LeaderStats
from hvd_async.worker import Worker

NAMES_IN_RING = 4


@dataclass(frozen=True)
class Strengths:
    """Of pulls: numbers in [0, 1), or functions of this rank's step.

    Attributes:
        local_pull, global_pull: when a pull comes.
        local_prox, global_prox: of the steps of a period together, between pulls.
        alpha, beta: EASGD's: of a rank towards the centre, of the centre towards the ranks' mean.
    """

    local_pull: Strength = 0.1
    global_pull: Strength = 0.1
    local_prox: Strength = 0.1
    global_prox: Strength = 0.1
    alpha: float = 0.0
    beta: float = 0.43


class Kept(NamedTuple):
    """What of a rank's following a checkpoint after ``cut()`` holds, beside its weights."""

    targets: dict[int, Vector]
    """Leaders' weights as they were last heard of: of all (-1), of this rank's group; the centre."""
    losses: list[float]


@dataclass
class _Come:
    """What pulls have brought, until the training thread takes it up.

    Attributes:
        targets: towards which weights this rank is pulled, by group; not where it leads itself. They are never changed.
        fresh: groups whose target is new, and who leads there, by the number of the pull.
        force: EASGD: what has to be added to the weights.
    """

    targets: dict[int, Vector] = field(default_factory=dict)
    fresh: dict[int, tuple[int, int]] = field(default_factory=dict)
    force: Vector = None


class FollowWorker(Worker):
    """One optimizer of one rank that follows a leader (LSGD) or a centre (EASGD).

    Args:
        engine: this rank's.
        config: the same on all ranks.
        strengths: of the pulls.
        post: how vectors travel.
        group_set: the process set of this rank's group, as the binding's collectives know it.
        window: how many losses count.
        finish: as ``Worker``.

    Attributes:
        log: where a test wants what happened to be recorded: ("step", number), ("sent", round), ("landed", round),
            ("pulled", round, group, leader).
    """

    def __init__(
        self,
        engine: Engine,
        config: LeaderConfig,
        strengths: Strengths,
        post: Post,
        group_set: Any,
        window: int,
        finish: Callable[[bool], object],
    ) -> None:
        super().__init__(engine, config, post.members, post.process_set_id, finish)
        self.config, self._strengths, self._post, self._group_set = config, strengths, post, group_set
        self._ranks = post.members or tuple(range(engine.size))
        self._place = self._ranks.index(engine.rank)
        self._group = next(number for number, places in enumerate(config.groups) if self._place in places)
        self._losses = LossWindow(window)
        self._lock = threading.Lock()
        """Held while what the engine and the training thread share changes."""
        self._shown: Vector = None
        """The weights after the last step; never changed."""
        self._come = _Come()
        self._centre: Vector = None
        """EASGD's (engine thread)."""
        self._commanded = 0
        """Pulls so far, of other groups too (engine thread, as the next two)."""
        self._flying: set[int] = set()
        """Pulls that this rank takes part in and that are not over."""
        self._waiting: list[Pull] = []
        """Pulls to submit, in order."""
        self._busy: set[int] = set()
        """Groups of which one is submitted and not over."""
        self._last: int | None = None
        """The last pull before a drain or cut that this rank has not ended yet; those after it wait."""
        self._leader = 0
        """Whose loss was lowest at the last end."""
        self._together = True
        """Whether all ranks had the same weights when this one began, or after its last drain or cut."""
        self._total = 0
        """Steps of all ranks until the last drain."""
        self._step = self._before = 0
        """Steps since the last drain or cut, and before it."""
        self._seconds = self._distance = 0.0
        self._bytes = 0
        self._history: list[tuple[float, int, int]] = []
        self._began = time.monotonic()
        self.keep: object = None
        self.log: list[Any] | None = None

    # -- a step -----------------------------------------------------------------------------------------------

    weight = 1.0
    """As of ``GossipWorker``: the optimizer works on the weights as they are."""
    wants_before = False

    def begin(self, weights: Vector) -> None:
        """The model's weights, shape (n,), the same on all ranks, before they meet; they belong to the worker."""
        self._shown = weights
        if self._centre is None:
            self._centre = weights

    def record_loss(self, loss: float) -> None:
        """The training loss of this step."""
        self._losses.record(loss)

    def check_step(self) -> None:
        """Raise, if no step can be taken now; before one changes any weight.

        Raises:
            ValueError: a leader has to be chosen, and this rank has never said how large its loss is.
        """
        self._opened_number()
        self._check_drained()
        if self.config.algorithm == "lsgd" and self._step and self._commanded and self._losses.mean is None:
            raise ValueError(
                "a leader is to be chosen by training losses, and this rank has recorded none: call "
                "opt.record_loss(loss) before each opt.step() (Keras' fit() does it by itself)"
            )

    def mix(self, before: Vector, after: Vector) -> Vector:
        """End a step: pull the weights towards what has come, or a little towards what is known.

        Args:
            before: not looked at.
            after: the weights after the update, shape (n,); they belong to the worker from now on.

        Returns:
            The weights to go on with, shape (n,); they must not be changed.
        """
        self.check_step()
        self._step += 1
        with self._lock:
            targets, fresh, force = dict(self._come.targets), self._come.fresh, self._come.force
            self._come.fresh, self._come.force = {}, None
        x = after if force is None else self._post.add(after, force, 1.0)
        if self.config.algorithm == "lsgd":
            x = self._pulled(x, targets, fresh) if fresh else self._near(x, targets)
        with self._lock:
            self._shown = x
            if self.log is not None:
                self.log += [("pulled", number, group, leader) for group, (number, leader) in sorted(fresh.items())]
                self.log.append(("step", self._before + self._step))
        number, mean = self._opened_number(), self._losses.mean
        self.send(Iterated(number, mean))
        return x

    def _pulled(self, x: Vector, targets: dict[int, Vector], fresh: dict[int, tuple[int, int]]) -> Vector:
        """First towards the group's leader, then towards that of all."""
        strengths = {self._group: self._strengths.local_pull, ALL: self._strengths.global_pull}
        for group, strength in strengths.items():
            if group in fresh and group in targets:
                by = leaders.at(strength, self._before + self._step)
                x = self._post.add(x * (1.0 - by), targets[group], by)
        return x

    def _near(self, x: Vector, targets: dict[int, Vector]) -> Vector:
        """Between pulls: towards both at once, by their part of a period."""
        step = self._before + self._step
        parts = {
            self._group: leaders.at(self._strengths.local_prox, step) / self.config.local_period,
            ALL: leaders.at(self._strengths.global_prox, step) / self.config.global_period,
        }
        parts = {group: part for group, part in parts.items() if part and group in targets}
        if parts:
            x = x * (1.0 - sum(parts.values()))
            for group, part in parts.items():
                x = self._post.add(x, targets[group], part)
        return x

    # -- ends -------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Pulls that this rank has seen land."""
        return len(self._history)

    @property
    def settled(self) -> bool:
        """Whether no step was taken since the last drain or cut."""
        return self._step == 0

    def _counts(self) -> list[int]:
        return [self._before + self._step]

    def _whole(self) -> bool:
        """Whether all ranks are done, and all pulls before that have landed."""
        drained = self._inbox.drained
        return drained is not None and not any(number <= drained.rounds for number in self._flying)

    @property
    def served(self) -> bool:
        """Whether ``serve`` would do something, or has done all."""
        return self._inbox.refused is not None or self._whole()

    def serve(self) -> bool:
        """Nothing to do but wait: what pulls bring is taken up by the next step."""
        self._check_refused()
        return self._whole()

    def conclude(self, flush: bool) -> None:
        """All ranks are done: with ``flush``, let the binding put ``gather``'s weights into the model."""
        drained = self._take_drained()
        self._leader, total = drained.leader, sum(drained.produced)
        if drained.flushed and total != self._total:
            self._end(True)
            self._total, self.keep, self._together = total, None, True
        elif not drained.flushed:
            self._together = False
        self._before += self._step
        self._step = 0
        self.engine.post(self._resume)

    def gather(self, weights: Vector, flush: bool) -> Vector:
        """In a drain: the weights of the leader of all ranks, or the centre. A collective.

        Args:
            weights: this rank's, shape (n,); they belong to the worker from now on.
            flush: always.
        """
        x = self.consensus(weights)
        with self._lock:
            self._shown, self._come, self._centre = x, _Come(), x
            if self.log is not None:
                self.log.append(("drained",))
        return x

    def consensus(self, weights: Vector) -> Vector:
        """What stands for all ranks: the weights of their leader, or the centre. A collective, right after an end.

        Args:
            weights: this rank's, shape (n,); they belong to the worker from now on.
        """
        if self.config.algorithm == "easgd":
            return self._centre
        name = f"hvd_async.follow.{self._opened_number()}.leader"
        return self.engine.broadcast(weights, self._leader, name, self._post.process_set)

    # -- checkpoints ------------------------------------------------------------------------------------------

    def kept(self) -> Kept | None:
        """What a checkpoint needs beside the weights, after a cut; None after a drain: nothing."""
        if self._together:
            return None
        with self._lock:
            targets = dict(self._come.targets)
            if self.config.algorithm == "easgd":
                targets[ALL] = self._centre
            return Kept(targets, self._losses.recorded)

    def restore(self, kept: Kept) -> None:
        """Begin with what an earlier run's cut has left (before ``open``)."""
        if self.config.algorithm == "easgd":
            self._centre = kept.targets.get(ALL)
        else:
            self._come.targets = dict(kept.targets)
        for loss in kept.losses:
            self._losses.record(loss)
        self._restored, self._together = True, False

    def retire(self) -> None:
        """This worker is of no more use, after a drain."""
        self.engine.unregister(self._opened_number())

    def stats(self) -> LeaderStats:
        """A snapshot."""
        pulls = self.version
        return LeaderStats(
            steps=self._before + self._step,
            pulls=pulls,
            led=dict(sorted(Counter(leader for _, _, leader in self._history).items())),
            distance=self._distance / pulls if pulls else 0.0,
            pull_s=self._seconds / pulls if pulls else 0.0,
            bytes_received=self._bytes,
            wait_s=self._wait_s,
            mean_loss=self._losses.mean,
            history=tuple(self._history),
        )

    # -- engine thread ----------------------------------------------------------------------------------------

    def obey(self, command: Command) -> None:
        """Carry out a command."""
        match command:
            case Pull():
                self._commanded += 1
                if command.group in (ALL, self._group):
                    self._flying.add(command.round)
                    self._waiting.append(command)
                    self._advance()
            case Drained():
                self._last = command.rounds
                super().obey(command)
            case _:
                super().obey(command)

    def _resume(self) -> None:
        self._last = None
        self._advance()

    def _advance(self) -> None:
        """Submit what need not wait: for the end of this rank's drain or cut, or for the group's pull before it."""
        waiting, self._waiting = self._waiting, []
        for command in waiting:
            late = self._last is not None and command.round > self._last
            if late or command.group in self._busy:
                self._waiting.append(command)
            else:
                self._busy.add(command.group)
                self._pull(command)

    def _pull(self, command: Pull) -> None:
        """Submit this rank's part."""
        name = f"hvd_async.pull.{command.optimizer}.{command.group}"
        process_set = self._post.process_set if command.group == ALL else self._group_set
        started, own = time.monotonic(), command.leader == self.engine.rank
        with self._lock:
            shown = self._shown
            if self.log is not None:
                self.log.append(("sent", command.round))

        def landed(vector: Vector) -> None:
            with self._lock:
                if command.leader == CENTRE:
                    self._move_centre(shown, vector)
                elif own:
                    self._come.targets.pop(command.group, None)
                else:
                    self._come.targets[command.group] = vector
                self._come.fresh[command.group] = (command.round, command.leader)
                if self.log is not None:
                    self.log.append(("landed", command.round))
            self._over(command, time.monotonic() - started)
            self._advance()

        if command.leader == CENTRE:
            self.engine.submit(lambda: self.engine.collectives.sum(shown + 0, name, process_set), landed)
        else:
            vector = shown + 0 if own else self._post.zeros() + 0
            self.engine.submit(
                lambda: self.engine.collectives.broadcast(vector, command.leader, name, process_set), landed
            )

    def _move_centre(self, shown: Vector, total: Vector) -> None:
        """EASGD, by the weights that this rank had when the pull was submitted, and their sum over the ranks."""
        alpha, beta = self._strengths.alpha, self._strengths.beta
        force = (self._centre - shown) * alpha
        self._come.force = force if self._come.force is None else self._post.add(self._come.force, force, 1.0)
        mean = total * (1.0 / len(self._ranks))
        self._centre = leaders.centred(self._centre, mean, beta)

    def _over(self, command: Pull, seconds: float) -> None:
        self._busy.discard(command.group)
        with self.engine.changed:
            self._flying.discard(command.round)
            self._history.append((time.monotonic() - self._began, command.group, command.leader))
            self._seconds += seconds
            self.engine.changed.notify_all()
        first = self._ranks[self.config.groups[self._group][0]] if command.group != ALL else self._ranks[0]
        if self.engine.rank == first:
            self.engine.send(Landed(command.optimizer, command.round))
