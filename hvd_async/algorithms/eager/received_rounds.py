"""Which rounds have come back to some rank, as far as is known; a roll call finds who holds up one that does not."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_async.algorithms.eager.messages import RoundsReceived
from hvd_async.algorithms.eager.round_state import Bucket
from hvd_async.errors import ProtocolError


class ReceivedRounds:
    """One optimizer's. A round comes back to all ranks at much the same time, so one of them speaks for all."""

    def __init__(self) -> None:
        self._whole = 0
        """Rounds that have come back in all buckets; of a single bucket more may be known."""
        self._calls = 0
        """Rolls that were called."""

    def note(self, rounds: int) -> None:
        """So many rounds have come back in all buckets."""
        if rounds > self._whole:
            self._whole = rounds

    def of(self, bucket: Bucket) -> int:
        """Return how many rounds of a bucket have."""
        return max(bucket.landed, self._whole)

    def call(self, buckets: Sequence[Bucket], fired_before: float) -> int | None:
        """Return the number of the roll call for rounds that fired so early and have not come back; None if none is."""
        late = [bucket for bucket in buckets if self.of(bucket) < bucket.fired and bucket.fired_at <= fired_before]
        if not late:
            return None
        self._calls += 1
        for bucket in late:
            bucket.called = bucket.called or self._calls
        return self._calls

    def report(self, rank: int, event: RoundsReceived, buckets: Sequence[Bucket]) -> None:
        """A rank answers.

        Raises:
            ProtocolError: what it says cannot be.
        """
        if len(event.landed) != len(buckets):
            raise ProtocolError(f"rank {rank} has {len(event.landed)} buckets of {len(buckets)}")
        if any(landed > bucket.fired for bucket, landed in zip(buckets, event.landed, strict=True)):
            raise ProtocolError(f"rank {rank} has seen rounds {event.landed}, which it cannot have")
        for bucket, landed in zip(buckets, event.landed, strict=True):
            if 0 < bucket.called <= event.call:
                bucket.answered.add(rank)
            bucket.landed = max(bucket.landed, landed)

    def blocked_on(self, buckets: Sequence[Bucket], ranks: Sequence[int]) -> tuple[str, frozenset[int]] | None:
        """Return the round that does not come back, and who holds it up, once a roll was called; else None."""
        for bucket in buckets:
            if bucket.called and self.of(bucket) < bucket.fired:
                silent = frozenset(ranks) - bucket.answered
                if silent:
                    return f"round {bucket.fired}, which has begun,", silent
                return f"round {bucket.fired}, which all have begun and Horovod has not ended,", frozenset(ranks)
        return None
