"""Do the ranks' optimizers fit together? What they say when they open, compared; and what mends a difference."""

from __future__ import annotations

from itertools import zip_longest

from hvd_async.errors import ranks_text
from hvd_async.events import Opened

STATE = "optimizer state: "
"""What names of the optimizer's own state begin with, in ``Opened``; all others are parameters."""


def disagreement(opened: dict[int, Opened]) -> str | None:
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
    differing = [rank for rank in sorted(opened) if opened[rank].checksums != first.checksums]
    if not differing:
        return None
    other = opened[differing[0]]
    name = next(n for n, a, b in zip(first.names, first.checksums, other.checksums, strict=True) if a != b)
    if name.startswith(STATE):
        return (
            f"the optimizer's state differs before the first step: {ranks_text(differing)} from rank {lowest}, first "
            f"in {name!r}. Call hvd.broadcast_optimizer_state(optimizer, root_rank=0) in torch, or use the Keras "
            f"BroadcastGlobalVariablesCallback(0), before training; and load checkpoints on every rank or on rank 0 "
            f"alone before that call."
        )
    return (
        f"the weights differ before the first step: {ranks_text(differing)} from rank {lowest}, first in {name!r}. "
        f"Call hvd.broadcast_parameters(model.state_dict(), root_rank=0) in torch, "
        f"hvd.broadcast_variables(model.variables, root_rank=0) or the Keras BroadcastGlobalVariablesCallback(0) in "
        f"TensorFlow, before training."
    )
