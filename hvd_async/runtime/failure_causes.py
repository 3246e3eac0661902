"""Why a job cannot go on: what the coordinator knows of it, as an error."""

from __future__ import annotations

import time

from hvd_async.errors import CollectiveFailedError, HvdAsyncError, RankLostError
from hvd_async.runtime import time_limits
from hvd_async.runtime.interfaces import Channel, Gone
from hvd_async.runtime.messages import Failed, JobFailed, RankLost

CAUSE_WAIT = 10.0
"""Seconds that a rank waits to hear why, longer than one that is gone may stay unnoticed."""


def error_of(message: RankLost | JobFailed | Gone) -> HvdAsyncError:
    """Return the error that a rank raises for this command, or for the end of its connection to the coordinator."""
    match message:
        case RankLost(rank, host, reason, context, handed_over):
            return RankLostError(rank, host, reason, context, handed_over)
        case JobFailed(problem):
            return CollectiveFailedError(problem)
        case Gone(reason, host):
            return RankLostError(0, host, reason)


def cause_of(error: Exception, channel: Channel) -> Exception:
    """Horovod says that a collective failed, not why: have the coordinator find out who is gone, if anybody is.

    Args:
        error: Horovod's.
        channel: to the coordinator.

    Returns:
        The error to raise: Horovod's own, if no rank is to blame for all that is known.
    """
    channel.send(Failed(f"{type(error).__name__}: {error}", horovod=True))
    deadline = time.monotonic() + time_limits.dead_after() + CAUSE_WAIT
    while (left := deadline - time.monotonic()) > 0:
        match channel.receive(left):
            case JobFailed():
                return error
            case RankLost() | Gone() as message:
                return error_of(message)
    return error
