"""Which gradients a rank may hand over now."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_async.algorithms.eager.hosts import Gathering
from hvd_async.algorithms.eager.messages import GradientReady, StepEntered
from hvd_async.algorithms.eager.round_state import Bucket, Positions
from hvd_async.errors import ProtocolError


def check_arrival(
    rank: int,
    host: int,
    event: GradientReady | StepEntered,
    fired: int,
    buckets: Sequence[Bucket],
    positions: Positions,
    gathering: Gathering,
) -> int:
    """Return the buckets of a rank's step that have arrived, as bits.

    Args:
        fired: rounds that have started in all buckets.

    Raises:
        ProtocolError: they cannot: they have before, or those of the step before have not, or its round has not fired.
    """
    ahead, held = positions.ahead.get(rank, 0), gathering.held.get(rank, 0)
    came, position = ahead | held, positions.of[rank]
    step = event.step
    for index in event.buckets:
        if not 0 <= index < len(buckets):
            raise ProtocolError(f"rank {rank} named bucket {index} of {len(buckets)}")
        if step != position + 1 or came >> index & 1 or step > buckets[index].fired + 1:
            raise ProtocolError(
                f"rank {rank} handed over step {step} of bucket {index} after step "
                f"{position + (came >> index & 1)}, with {buckets[index].fired} rounds fired"
            )
        came |= 1 << index
    if gathering.step(host) not in (None, step):
        raise ProtocolError(f"rank {rank} handed over step {step}, and other ranks of its host another")
    if event.landed > fired:
        raise ProtocolError(f"rank {rank} has seen round {event.landed}, which it cannot have")
    return came & ~ahead & ~held
