"""The trace of a run as files: a folder with ``rank.N.jsonl`` for each rank. A header, then a line for each step. Pure.

Times are Unix times in seconds by the rank's own clock.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hvd_async.algorithms.eager.quorum import waits_for_all

# -- what is written ---------------------------------------------------------------------------------------------------


VERSION = 1
"""The format's."""
HOROVOD = "horovod"
"""``Header.algorithm`` of ``hvd.DistributedOptimizer``."""
DDP = "ddp"
"""``Header.algorithm`` of torch's ``DistributedDataParallel``."""
FSDP = "fsdp"
"""``Header.algorithm`` of torch's ``fully_shard`` (FSDP2)."""
SYNCHRONOUS = (HOROVOD, DDP, FSDP)
"""Algorithms in which every rank waits for all others in every step."""
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
        algorithm: "horovod", "ddp", "fsdp"; "eager", "sgp" and so on; "none".
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


# -- reading -----------------------------------------------------------------------------------------------------------
# Reads a trace and checks it: whether all ranks are there, of one run, with steps enough.


Times = NDArray[np.float64]
LEAST = 20
"""Steps that a trace needs."""


@dataclass(frozen=True)
class Trace:
    """A run's trace: the steps that all ranks have recorded, after those that were left out.

    Attributes:
        headers: by rank.
        begin, arrived, released, done: Unix times in s by each rank's own clock, [steps, ranks].
        left_out: steps at the start that are not in it.
    """

    headers: Sequence[Header]
    begin: Times
    arrived: Times
    released: Times
    done: Times
    left_out: int

    @property
    def ranks(self) -> int:
        """How many."""
        return len(self.headers)

    @property
    def steps(self) -> int:
        """Number of steps that each rank has here."""
        return len(self.begin)

    @property
    def work(self) -> Times:
        """Seconds that each rank was at work in each step, [steps, ranks]: before it arrived, and after its waiting."""
        return np.maximum(self.arrived - self.begin, 0.0) + np.maximum(self.done - self.released, 0.0)

    @property
    def waits(self) -> Times:
        """Seconds that each rank waited in each step, [steps, ranks]."""
        return self.released - self.arrived

    @property
    def steps_per_s(self) -> float:
        """Steps of a rank a second, the mean over the ranks, without what was left out between steps."""
        return float(np.mean(self.steps / (self.done - self.begin).sum(axis=0)))

    @property
    def local_size(self) -> int:
        """Ranks of a host; 1 where hosts have different numbers of ranks, or these do not follow each other."""
        hosts = [header.host for header in self.headers]
        size = hosts.count(hosts[0])
        groups = [set(hosts[first : first + size]) for first in range(0, len(hosts), size)]
        alike = len(hosts) % size == 0 and all(len(group) == 1 for group in groups) and len(set(hosts)) == len(groups)
        return size if alike else 1

    @property
    def synchronous(self) -> bool:
        """Whether every rank waited for all others in every step."""
        first, quorum = self.headers[0], self.headers[0].options.get("quorum")
        return first.algorithm in SYNCHRONOUS or (quorum is not None and waits_for_all(quorum, self.ranks))

    @property
    def clocks_ahead(self) -> Times | None:
        """Seconds that each rank's clock is ahead of rank 0's, [ranks]; None if that is unknown.

        Ranks of one host have one clock. Others' are told from the ends of their waits, where all ranks are released
        together: by the median of the differences.
        """
        told = [header.clock_ahead_s for header in self.headers]
        if all(each is not None for each in told):
            return np.array(told, dtype=np.float64)
        if len({header.host for header in self.headers}) == 1:
            return np.zeros(self.ranks)
        if not self.synchronous:
            return None
        ahead: Times = np.median(self.released - self.released[:, :1], axis=0)
        return ahead


def read_trace(folder: str | os.PathLike[str], skip: int = 3, least: int = LEAST) -> Trace:
    """Read a trace.

    Args:
        folder: which ``record`` has written, with the files of all ranks.
        skip: steps at the start to leave out, in which caches fill and ranks meet.
        least: steps that must remain.

    Raises:
        ValueError: it is no whole trace; the message says what is missing.
    """
    if skip < 0:
        raise ValueError(f"skip={skip}: leave out 0 steps or more")
    path = Path(folder)
    first = file_of(path, 0)
    if not first.exists():
        raise ValueError(f"{path} has no {first.name}: name the folder that was recorded, with every rank's file")
    ranks = _read(first)[0].ranks
    missing = [rank for rank in range(ranks) if not file_of(path, rank).exists()]
    if missing:
        names = ", ".join(file_of(path, rank).name for rank in missing[:5])
        raise ValueError(f"{path} is of {ranks} ranks and lacks {names}: copy every rank's file into one folder")
    read = [_read(file_of(path, rank)) for rank in range(ranks)]
    headers = [header for header, _ in read]
    for rank, header in enumerate(headers):
        same = (header.rank, header.ranks, header.algorithm) == (rank, ranks, headers[0].algorithm)
        if not same:
            raise ValueError(
                f"{file_of(path, rank)} is rank {header.rank}'s of {header.ranks} under {header.algorithm!r}, rank 0's "
                f"is of {ranks} under {headers[0].algorithm!r}: the folder mixes runs, record into an empty one"
            )
        if header.run != headers[0].run:
            raise ValueError(
                f"{file_of(path, rank)} and {first.name} are of different runs ({header.run}, {headers[0].run}): copy "
                "all ranks' files of one run into a folder of their own, or record again"
            )
    count = min(len(steps) for _, steps in read) - skip
    if count < least:
        rank = min(range(ranks), key=lambda each: len(read[each][1]))
        raise ValueError(
            f"rank {rank} has recorded {len(read[rank][1])} steps: after the {skip} that are left out at least {least} "
            f"are needed, and 200 say more"
        )
    table = np.array([[msgspec.structs.astuple(s) for s in steps[skip : skip + count]] for _, steps in read])
    begin, arrived, released, done = np.moveaxis(table, (2, 1, 0), (0, 1, 2))
    return Trace(headers, begin, arrived, released, done, skip)


def _read(path: Path) -> tuple[Header, list[Step]]:
    """Return a file's header and steps. A last line that is cut off, of a job that was killed, is left out."""
    head, *lines = path.read_bytes().split(b"\n")
    try:
        version = msgspec.json.decode(head, type=_Version).version
        if version != VERSION:
            raise ValueError(f"{path} is in version {version} of the format, this is hvd_async for {VERSION}")
        return msgspec.json.decode(head, type=Header), [msgspec.json.decode(x, type=Step) for x in lines[:-1]]
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} is no file of a trace: {error}") from error


class _Version(msgspec.Struct):
    """The part of a header that tells how to read the rest."""

    version: int
