"""The trace of a run as files: a folder with ``rank.N.jsonl`` for each rank. A header, then a line for each step. Pure.

Times are Unix times in seconds by the rank's own clock.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

VERSION = 1
"""The format's."""
HOROVOD = "horovod"
"""``Header.algorithm`` of ``hvd.DistributedOptimizer``."""
PLAIN = "none"
"""``Header.algorithm`` of an optimizer that is not wrapped, and of a loop that is marked by hand."""


class Header(msgspec.Struct, frozen=True, omit_defaults=True):
    """The first line of a rank's file.

    Attributes:
        version: of the format.
        rank: which one, from 0.
        ranks: of the job.
        host: the name of the rank's machine.
        framework: "torch", "keras", or what a loop that is marked by hand says.
        algorithm: "horovod"; "eager", "sgp" and so on; "none".
        options: of the optimizer, by name.
        parameter_bytes: of what is trained; gradients have as many.
        buckets: parts in which gradients travel; 0: unknown.
        synchronized: whether the device was synchronized before each mark, so that times on a GPU are true.
        clock_ahead_s: seconds that this rank's clock is ahead of rank 0's; None: unknown.
        run: what all ranks of a run have alike, and those of another one do not; None: unknown.
    """

    version: int
    rank: int
    ranks: int
    host: str
    framework: str
    algorithm: str
    options: dict[str, Any] = {}
    parameter_bytes: int = 0
    buckets: int = 0
    synchronized: bool = True
    clock_ahead_s: float | None = None
    run: str | None = None


class Step(msgspec.Struct, frozen=True):
    """One step of a rank.

    Attributes:
        begin_s: when it began: the end of the step before.
        arrived_s: when the gradients were there; from here the rank waits for others.
        released_s: when it had what it waited for.
        done_s: when the optimizer's step returned.
    """

    begin_s: float
    arrived_s: float
    released_s: float
    done_s: float


def file_of(folder: Path, rank: int) -> Path:
    """Return the file of a rank."""
    return folder / f"rank.{rank}.jsonl"
