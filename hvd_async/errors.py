"""Every error this library raises of its own accord; wrong arguments raise the built-in ``ValueError``.

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
        error: of the import.
        framework: "torch" or "tensorflow".
    """
    without = {
        "torch": "Or launch with torchrun, which needs no Horovod, and set HVD_ASYNC_TRANSPORT=torch.",
        "tensorflow": "Only PyTorch trains without Horovod.",
    }
    return ImportError(
        f"hvd_async.{framework} needs Horovod, which cannot be imported ({error}). Build it for your {framework}, in a "
        f'checkout of hvd_async: bash scripts/install_horovod.sh --python "$(which python)" (pip install horovod '
        f"fails beside today's frameworks). {without[framework]} hvd_async doctor says what else is missing."
    )


class HvdAsyncError(RuntimeError):
    """Base class of the library's errors."""


class NotInitializedError(HvdAsyncError):
    """An optimizer was wrapped, or stepped, before ``hvd.init()``."""

    def __init__(self) -> None:
        super().__init__("Horovod is not initialized: call hvd.init() first, then wrap the optimizer")


class ProtocolError(HvdAsyncError):
    """An event that the coordinator's state machine does not allow in its present state. Nothing was changed."""


class ReplicaMismatchError(HvdAsyncError):
    """The ranks do not start from the same optimizer: other weights, other parameters, or other settings."""


class GradientLossError(HvdAsyncError):
    """The conservation check of ``drain()`` failed: gradients applied are not the gradients produced."""


class ReplicaStateError(HvdAsyncError):
    """A call that would break the replicas' agreement, refused before it did anything."""


class EngineError(HvdAsyncError):
    """The background engine stopped on an error of its own; the cause is chained."""


class RankLostError(HvdAsyncError):
    """A rank died, failed, or left without draining.

    Attributes:
        rank: the lost rank.
        host: the name of its host.
        reason: what is known of why.
        handed_over: by optimizer, how many gradients each of its ranks had handed over since the ranks were last
            others, as far as the coordinator knows; None where it was lost itself.
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
    """Horovod has failed on some rank although all ranks are there: nobody is known to be to blame."""


class WaitTimeoutError(HvdAsyncError):
    """The opt-in limit on waiting (``HVD_ASYNC_TIMEOUT``, s) ran out while every rank was still alive."""


def ranks_text(ranks: Iterable[int]) -> str:
    """``{0, 2}`` as "ranks 0, 2", ``{1}`` as "rank 1"."""
    ordered = sorted(ranks)
    return f"rank{'s' if len(ordered) != 1 else ''} {', '.join(map(str, ordered))}"
