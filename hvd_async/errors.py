"""Errors of this library. Invalid arguments raise the built-in ``ValueError``.

A leaf module: it imports nothing of the package.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

__all__ = [
    "CollectiveFailedError", "EngineError", "GradientLossError", "HvdAsyncError", "NotInitializedError",
    "ProtocolError", "RankLostError", "ReplicaMismatchError", "ReplicaStateError", "WaitTimeoutError", "no_horovod",
    "ranks_text",
]  # fmt: skip


def no_horovod(error: ImportError, framework: str) -> ImportError:
    """Return the error of a binding whose Horovod cannot be imported.

    Args:
        error: the error of the import.
        framework: "torch" or "tensorflow".
    """
    without = {
        "torch": "Or launch with torchrun, which needs no Horovod, and set HVD_ASYNC_TRANSPORT=torch.",
        "tensorflow": "Only PyTorch trains without Horovod.",
    }
    return ImportError(
        f"hvd_async.{framework} needs Horovod, which cannot be imported ({error}). Build it for your {framework}, in a "
        f'checkout of hvd_async: bash scripts/install_horovod.sh --python "$(which python)" (pip install horovod '
        f"fails with today's frameworks). {without[framework]} hvd_async doctor says what else is missing."
    )


class HvdAsyncError(RuntimeError):
    """Base class of the errors of this library."""


class NotInitializedError(HvdAsyncError):
    """An optimizer was wrapped or stepped before ``hvd.init()``."""

    def __init__(self) -> None:
        super().__init__("hvd_async is not initialized: call hvd.init() first, then wrap the optimizer")


class ProtocolError(HvdAsyncError):
    """An event is not allowed in the current state of the coordinator's state machine. Nothing was changed."""


class ReplicaMismatchError(HvdAsyncError):
    """The ranks start from different optimizers: their weights, parameters or settings differ."""


class GradientLossError(HvdAsyncError):
    """The conservation check of ``drain()`` failed: the gradients applied are not the gradients produced."""


class ReplicaStateError(HvdAsyncError):
    """A call would make replicas differ, and was refused before it changed anything."""


class EngineError(HvdAsyncError):
    """The background engine stopped on an internal error; the cause is chained."""


class RankLostError(HvdAsyncError):
    """A rank died, failed, or left without draining.

    Attributes:
        rank: the lost rank.
        host: the name of its host.
        reason: why it is lost, as far as is known.
        handed_over: by optimizer number, the gradients that each of its ranks had handed over since the last
            membership change, as far as the coordinator knows; None if the coordinator was lost.
    """

    def __init__(
        self,
        rank: int,
        host: str,
        reason: str,
        context: str = "",
        handed_over: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        self.rank, self.host, self.reason, self.handed_over = rank, host, reason, handed_over
        super().__init__(f"rank {rank} on host {host} {reason}{f' ({context})' if context else ''}")


class CollectiveFailedError(HvdAsyncError):
    """Horovod has failed on some rank although all ranks are alive, so that no rank is known to have caused it."""


class WaitTimeoutError(HvdAsyncError):
    """The opt-in limit of a wait (``HVD_ASYNC_TIMEOUT``, s) has passed while every rank was alive."""


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ``{0, 2}`` as "ranks 0, 2", and ``{1}`` as "rank 1"."""
    ordered = sorted(ranks)
    return f"rank{'s' if len(ordered) != 1 else ''} {', '.join(map(str, ordered))}"
