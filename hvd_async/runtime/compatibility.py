"""Do the ranks' optimizers fit together? What they say when they open, compared; and what mends a difference."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from hvd_async.errors import ranks_text
from hvd_async.runtime.messages import Registered

STATE = "optimizer state: "
"""Prefix of the names of the optimizer's own state in ``Registered``; all other names are parameters."""


MOST_BUCKETS = 1 << 16


def fault_of(rank: int, opened: Registered[Any], size: int) -> str | None:
    """Return why ``opened`` cannot be, whatever the other ranks say; None if it can.

    Args:
        rank: whose it is.
        size: ranks in the job.
    """
    members = opened.members  # (none are all: what that costs must not depend on how many these are)
    if members and not (
        rank in members and len(set(members)) == len(members) and 0 <= min(members) <= max(members) < size
    ):
        return f"it shares an optimizer with the ranks {members}, of {size}"
    if len(opened.names) != len(opened.checksums):
        return f"it named {len(opened.names)} parameters, with {len(opened.checksums)} checksums"
    if not 0 < opened.config.counts <= MOST_BUCKETS:
        return f"it has {opened.config.counts} buckets of gradients, of {MOST_BUCKETS} at the most"
    return None


def mismatch(opened: dict[int, Registered[Any]]) -> str | None:
    """How the ranks' optimizers differ, and what mends it; None if they agree."""
    lowest = min(opened)
    first = opened[lowest]
    for rank in sorted(opened):
        other = opened[rank]
        if other.members != first.members:
            return (
                f"the ranks share this optimizer with different ranks: rank {lowest} with {first.members}, rank {rank} "
                f"with {other.members}. Pass the same process_set on every rank of it."
            )
        if other.config != first.config:
            return (
                f"the ranks wrapped their optimizers differently: rank {lowest} has {first.config}, rank {rank} "
                f"has {other.config}. Pass the same arguments on every rank."
            )
        if other.names != first.names:
            pairs = zip_longest(first.names, other.names, fillvalue="nothing")
            own, others = next(pair for pair in pairs if pair[0] != pair[1])
            return (
                f"the ranks train different parameters, or with other settings: rank {lowest} has {own!r} where rank "
                f"{rank} has {others!r} (of {len(first.names)} and {len(other.names)} entries). Build the same model "
                f"on every rank, with the same optimizer, and let every rank's optimizers take their first step in "
                f"the same order."
            )
    difference = differing_replicas({rank: (one.names, one.checksums) for rank, one in opened.items()})
    if difference is None:
        return None
    differing, name = difference
    if name.startswith(STATE):
        return (
            f"the optimizer's state differs before the first step: {ranks_text(differing)} from rank {lowest}, first "
            f"in {name!r}. Call hvd.broadcast_optimizer_state(optimizer, root_rank=0) in torch, or use the Keras "
            f"BroadcastGlobalVariablesCallback(0) of hvd_async.tensorflow.keras, before training; and load checkpoints "
            f"on every rank or on rank 0 alone before that call."
        )
    return (
        f"the weights differ before the first step: {ranks_text(differing)} from rank {lowest}, first in {name!r}. "
        f"Call hvd.broadcast_parameters(model.state_dict(), root_rank=0) in torch, "
        f"hvd.broadcast_variables(model.variables, root_rank=0) or the Keras BroadcastGlobalVariablesCallback(0) of "
        f"hvd_async.tensorflow.keras in TensorFlow, before training. (Horovod's own does not work on Keras 3.) If it "
        f"was called, something has changed weights on each rank since then, such as an optimizer that is not wrapped "
        f"or the first half of SAM."
    )


def differing_replicas(replicas: dict[int, tuple[list[str], list[int]]]) -> tuple[list[int], str] | None:
    """Which ranks' (names, checksums) are not the lowest rank's, and the first name that differs; None if all agree."""
    names, checksums = replicas[min(replicas)]
    differing = [rank for rank in sorted(replicas) if replicas[rank] != (names, checksums)]
    if not differing:
        return None
    pairs = zip_longest(zip(names, checksums, strict=True), zip(*replicas[differing[0]], strict=True))
    name = next(str((own or other)[0]) for own, other in pairs if own != other)
    return differing, name
