"""File format of a trace: a folder with ``rank.N.jsonl`` per rank N, which has a header, then a line per step. Pure.

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
from hvd_async.runtime.launch import Seat, place_of

# -- the format --------------------------------------------------------------------------------------------------------


VERSION = 1
"""Version of the format."""
HOROVOD = "horovod"
"""``Header.algorithm`` of ``hvd.DistributedOptimizer``."""
DDP = "ddp"
"""``Header.algorithm`` of torch's ``DistributedDataParallel``."""
FSDP = "fsdp"
"""``Header.algorithm`` of torch's ``fully_shard`` (FSDP2)."""
SYNCHRONOUS = (HOROVOD, DDP, FSDP)
"""Algorithms in which every rank waits for all others in every step."""
PLAIN = "none"
"""``Header.algorithm`` of an optimizer that is not wrapped, and of a loop that sets its own marks."""


class Header(msgspec.Struct, frozen=True, omit_defaults=True):
    """First line of a rank's file.

    Attributes:
        version: of the format.
        rank: from 0.
        ranks: number of ranks of the job.
        host: name of the rank's machine.
        framework: "torch", "keras", or a name passed by the script.
        algorithm: "horovod", "ddp", "fsdp"; "eager", "sgp" and so on; "none".
        options: of the optimizer, by name.
        parameter_bytes: of the trained parameters; gradients have as many.
        buckets: number of parts in which gradients are sent; 0: unknown.
        synchronized: whether the device was synchronized before each mark, so that times on a GPU are correct.
        clock_ahead_s: seconds by which this rank's clock is ahead of rank 0's; None: unknown.
        run: identifies the run, the same on all ranks; None: unknown.
        node, local_rank: what tells hosts of one name apart, see ``launch.Seat``; files of 0.2.0 have neither.
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
    node: str = ""
    local_rank: int | None = None


class Step(msgspec.Struct, frozen=True):
    """One step of a rank.

    Attributes:
        begin_s: start of the step: the end of the previous one.
        arrived_s: time at which the gradients were ready, and the wait for other ranks began.
        released_s: end of the wait.
        done_s: return of the optimizer's step.
    """

    begin_s: float
    arrived_s: float
    released_s: float
    done_s: float


def file_of(folder: Path, rank: int) -> Path:
    """Return the file of a rank."""
    return folder / f"rank.{rank}.jsonl"


# -- reading -----------------------------------------------------------------------------------------------------------
# Reading checks that a trace has all ranks of one run, with enough steps.


Times = NDArray[np.float64]
LEAST = 20
"""Minimum number of steps of a trace."""


@dataclass(frozen=True)
class Trace:
    """Trace of a run: the steps that all ranks have recorded, without the skipped first ones.

    Attributes:
        headers: by rank.
        begin, arrived, released, done: Unix times in s by each rank's own clock, [steps, ranks].
        left_out: number of skipped first steps.
    """

    headers: Sequence[Header]
    begin: Times
    arrived: Times
    released: Times
    done: Times
    left_out: int

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.headers)

    @property
    def steps(self) -> int:
        """Number of steps per rank."""
        return len(self.begin)

    @property
    def work(self) -> Times:
        """Seconds that each rank worked in each step, [steps, ranks]: before it arrived, and after its wait."""
        return np.maximum(self.arrived - self.begin, 0.0) + np.maximum(self.done - self.released, 0.0)

    @property
    def waits(self) -> Times:
        """Seconds that each rank waited in each step, [steps, ranks]."""
        return self.released - self.arrived

    @property
    def steps_per_s(self) -> float:
        """Steps per second of a rank, the mean over the ranks, without pauses between steps that were skipped."""
        return float(np.mean(self.steps / (self.done - self.begin).sum(axis=0)))

    @property
    def hosts(self) -> list[str]:
        """Name of each rank's host, which no other host has."""
        seats = [Seat(header.host, header.node, header.local_rank) for header in self.headers]
        return [place_of(rank, seats).host for rank in range(self.ranks)]

    @property
    def local_size(self) -> int:
        """Ranks per host; 1 if hosts differ in their number, or if a host's ranks are not consecutive."""
        hosts = self.hosts
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
        """Seconds by which each rank's clock is ahead of rank 0's, [ranks]; None if unknown.

        Ranks of one host share a clock. Clocks of hosts are compared at the ends of waits, which all ranks reach
        together, by the median of the differences.
        """
        recorded = [header.clock_ahead_s for header in self.headers]
        if all(each is not None for each in recorded):
            return np.array(recorded, dtype=np.float64)
        if len(set(self.hosts)) == 1:
            return np.zeros(self.ranks)
        if not self.synchronous:
            return None
        ahead: Times = np.median(self.released - self.released[:, :1], axis=0)
        return ahead


def read_trace(folder: str | os.PathLike[str], skip: int = 3, least: int = LEAST) -> Trace:
    """Read a trace.

    Args:
        folder: with the files of all ranks.
        skip: number of first steps to leave out, in which caches fill and ranks connect.
        least: minimum number of remaining steps.

    Raises:
        ValueError: the trace is incomplete; the message names the missing part.
    """
    if skip < 0:
        raise ValueError(f"skip must be a number of steps, at least 0, got {skip}")
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
    """Return a file's header and steps, without an incomplete last line of a job that was killed."""
    head, *lines = path.read_bytes().split(b"\n")
    try:
        version = msgspec.json.decode(head, type=_Version).version
        if version != VERSION:
            raise ValueError(f"{path} is in version {version} of the format, this is hvd_async for {VERSION}")
        return msgspec.json.decode(head, type=Header), [msgspec.json.decode(x, type=Step) for x in lines[:-1]]
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} cannot be read as a file of a trace: {error}") from error


class _Version(msgspec.Struct):
    """Part of a header that determines how to read the rest."""

    version: int
