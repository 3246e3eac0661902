"""What the coordinator has been told and has commanded, kept apart from it, and checked against the promises."""

from __future__ import annotations

from hvd_async import activation
from hvd_async.events import Arrived, Command, Done, Drained, EagerConfig, Go, Hyper, Settle
from hvd_async.rounds import EagerEvent


class Ledger:
    """Checks every command as it comes.

    Attributes:
        fired: rounds of each bucket.
        handed: bucket -> rank -> its last step that has arrived.
        arrivals: (bucket, round) -> the ranks that came in time for it, in order.
        told: (rank, step) -> the hyperparameters it reports there.
        hypers: round -> what it is applied with.
        drain_rounds: those fired because all were done.
        cuts: gradients produced at each drain.
    """

    def __init__(self, config: EagerConfig, size: int) -> None:
        self.config, self.size = config, size
        self.fired = [0] * config.buckets
        self.arrivals: dict[tuple[int, int], list[int]] = {}
        self.handed = [[0] * size for _ in range(config.buckets)]
        self.done: set[int] = set()
        self.told: dict[tuple[int, int], Hyper] = {}
        self.hypers: dict[int, Hyper] = {}
        self.drain_rounds: set[int] = set()
        self.cuts: list[int] = []
        self._quorum_since: list[float | None] = [None] * config.buckets
        self._leaders: dict[int, int] = {}
        self._unsettled: set[int] = set()

    def hear(self, rank: int, event: EagerEvent, now: float) -> None:
        """An event that is about to reach the state machine."""
        if isinstance(event, Arrived):
            assert event.step == self.handed[event.bucket][rank] + 1
            self.handed[event.bucket][rank] = event.step
            if event.step == self.fired[event.bucket] + 1:
                self.arrivals.setdefault((event.bucket, event.step), []).append(rank)
        if isinstance(event, Done):
            self.done.add(rank)
        self._watch_quorum(now)

    def check(self, commands: list[Command], rank: int | None, now: float, produced: int) -> None:
        """The commands that came of it.

        Args:
            rank: whose event it was; None if it was only time.
            produced: gradients so far.

        Raises:
            AssertionError: one breaks a promise.
        """
        ending = any(isinstance(c, Drained) for c in commands)
        for command in commands:
            if isinstance(command, Go):
                self._check_go(command, ending, now)
            elif isinstance(command, Settle):
                self._check_settle(command)
            elif isinstance(command, Drained):
                self._check_all_done(command, rank)
                self.cuts.append(produced)
        self._watch_quorum(now)

    def active(self) -> set[int]:
        """Ranks that are not done."""
        return set(range(self.size)) - self.done

    def quorum_met(self, bucket: int) -> bool:
        """By the quorum's definition, not by ``activation``."""
        round_ = self.fired[bucket] + 1
        arrived, active, quorum = self.arrivals.get((bucket, round_), []), self.active(), self.config.quorum
        if not arrived:
            return False
        if quorum == "solo":
            return True
        if quorum == "majority":
            return activation.initiator(round_, self.config.seed, active, self.size) in arrived
        want = self.size if quorum == "all" else quorum if isinstance(quorum, int) else quorum * self.size
        assert not isinstance(want, str)
        return len(arrived) >= min(want, len(active))

    def _watch_quorum(self, now: float) -> None:
        for bucket in range(self.config.buckets):
            if not self.quorum_met(bucket):
                self._quorum_since[bucket] = None
            elif self._quorum_since[bucket] is None:
                self._quorum_since[bucket] = now

    def _check_go(self, go: Go, ending: bool, now: float) -> None:
        bucket, round_ = go.bucket, go.round
        assert round_ == self.fired[bucket] + 1, f"bucket {bucket}: round {round_} after {self.fired[bucket]}"
        arrived = self.arrivals.get((bucket, round_), [])
        if ending:
            assert self.done == set(range(self.size))
            self.drain_rounds.add(round_)
        else:
            assert self.quorum_met(bucket), f"round {round_} fired without its quorum: {arrived} of {self.active()}"
            since = self._quorum_since[bucket]
            assert since is not None
            assert now >= since + self.config.grace or set(arrived) == self.active(), "fired within its grace"
            for rank in self.active():
                assert round_ - self.handed[bucket][rank] <= self.config.max_staleness
            self._leaders.setdefault(round_, self._leader(round_, arrived))
        self.fired[bucket] = round_
        self._quorum_since[bucket] = None
        self._check_hyper(round_, go.hyper)

    def _leader(self, round_: int, arrived: list[int]) -> int:
        if self.config.quorum == "majority":
            return activation.initiator(round_, self.config.seed, self.active(), self.size)
        return arrived[0]

    def _check_hyper(self, round_: int, hyper: Hyper | None) -> None:
        if hyper is None:
            assert round_ not in self.hypers, "the hyperparameters were known already"
            self._unsettled.add(round_)
            return
        assert self.hypers.setdefault(round_, hyper) == hyper
        if round_ in self._leaders:
            leader = self._leaders[round_]
            assert hyper == self.told[leader, round_], f"round {round_} is led by rank {leader}"
        else:
            last = max((t for t in self.hypers if t < round_), default=None)
            assert last is not None
            assert hyper == self.hypers[last], "a last round has the last hyperparameters"

    def _check_settle(self, settle: Settle) -> None:
        assert settle.round in self._unsettled, "a Settle that nobody waits for"
        self._unsettled.discard(settle.round)
        self._check_hyper(settle.round, settle.hyper)

    def _check_all_done(self, drained: Drained, rank: int | None) -> None:
        assert self.done == set(range(self.size))
        assert drained.last == rank
        assert set(self.fired) == {drained.rounds}
        assert not self._unsettled, f"rounds {self._unsettled} never got hyperparameters"
        self.done.clear()
        self.handed = [[drained.rounds] * self.size for _ in range(self.config.buckets)]
