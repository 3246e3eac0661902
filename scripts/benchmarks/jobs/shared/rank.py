"""One rank of a job: the plan, meeting the other ranks, recording blocks. No framework here.

The binding's module (``hvd_async.torch`` or ``hvd_async.tensorflow``) is handed in.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import math
import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import psutil

from ...support.digits import FOLDER

faulthandler.register(signal.SIGUSR1, all_threads=True)  # to see where a job hangs
WARM_UP = 0.1
"""Share of the steps in which the learning rate rises from 0; then it falls as a cosine."""


Block = dict[str, Any]
"""One entry of a plan: an arm with its settings."""
RunBlock = Callable[["Job", Block], None]


class Job:
    """One rank of a job.

    Args:
        hvd: the binding's module, initialised.
        barrier: waits for all ranks without keeping a core busy.
    """

    def __init__(self, hvd: Any, barrier: Callable[[], None]) -> None:
        self.rank, self.size = int(hvd.rank()), int(hvd.size())
        self.folder = Path(os.environ[FOLDER])
        self.plan: dict[str, Any] = json.loads((self.folder / "plan.json").read_text())
        self.barrier = barrier
        self._gathered = 0
        if self.rank == 0:
            (self.folder / "unfinished").touch()
        (self.folder / f"pid.{self.rank}").write_text(str(os.getpid()))

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank.

        By files: Horovod's functions of objects ask without end whether they are done, and where ranks share cores the
        threads that they wait for may come to none, for longer than Gloo's limit of 30 s.
        """
        self._gathered += 1
        ours = [self.folder / f"gathered.{self._gathered}.{rank}" for rank in range(self.size)]
        ours[self.rank].write_bytes(pickle.dumps(value))
        self.barrier()
        (self.folder / f"gathered.{self._gathered - 1}.{self.rank}").unlink(missing_ok=True)  # (all have read it)
        return [pickle.loads(file.read_bytes()) for file in ours]

    def agree(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        return self.gather(value)[0]

    def same(self, content: bytes) -> bool:
        """Collective: whether all ranks have the same, bit for bit."""
        return len(set(self.gather(hashlib.sha256(content).hexdigest()))) == 1

    def record(self, block: Block, own: dict[str, Any]) -> list[dict[str, Any]]:
        """Write a block: what was asked, without its times, and what every rank found. Returns the latter."""
        found = self.gather(own)
        if self.rank == 0:
            asked = {key: value for key, value in block.items() if key != "times"}
            with (self.folder / "blocks.jsonl").open("a") as results:
                results.write(json.dumps({**asked, "by_rank": found}) + "\n")
        return found

    def conclude(self, arm: Trained, block: Block, own: dict[str, Any]) -> None:
        """End a block: compare the ranks' drained weights, stop the arm's engine, record what was found."""
        own["identical"] = arm.identical()
        arm.close()
        self.record(block, own)

    def each_block(self, run_block: RunBlock) -> None:
        """Run the plan's blocks."""
        for block in self.plan["blocks"]:
            run_block(self, block)

    def finish(self) -> None:
        """The job has come to its end: call it last."""
        self.barrier()
        if self.rank == 0:
            (self.folder / "unfinished").unlink()


class Trained(Protocol):
    """A model that an arm has trained."""

    def identical(self) -> bool:
        """Collective: return whether all ranks have the same weights, bit for bit."""

    def close(self) -> None:
        """Collective: stop the engine, so that the next arm starts with its own."""


def rate(highest: float, step: int, steps: int) -> float:
    """The learning rate of a step: up in a line, then down as a cosine."""
    up = WARM_UP * steps
    if step < up:
        return highest * (step + 1) / up
    return highest * 0.5 * (1 + math.cos(math.pi * (step - up) / (steps - up)))


def counted(stats: Any) -> dict[str, Any]:
    """Return ``stats()`` as JSON."""
    return {key: _plain(value) for key, value in vars(stats).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, int | float | str | None) else str(value)


def difference(after: Any, before: Any) -> Any:
    """Return the counts since ``before``, in numbers, lists and dictionaries alike."""
    if isinstance(after, dict):
        return {key: difference(value, before.get(key)) for key, value in after.items()}
    if isinstance(after, list):
        earlier = before if before else [0] * len(after)
        return [difference(a, b) for a, b in zip(after, earlier, strict=True)]
    if isinstance(after, int | float) and not isinstance(after, bool):
        return after - (before or 0)
    return after


def resident_mb() -> float:
    """This process's memory, in MB (10^6 bytes)."""
    return float(psutil.Process().memory_info().rss) / 1e6


def traffic() -> tuple[int, int]:
    """Bytes that this host's network interfaces have received and sent, the loopback aside."""
    lines = [line.split() for line in Path("/proc/net/dev").read_text().replace(":", ": ").splitlines()[2:]]
    counts = [(int(line[1]), int(line[9])) for line in lines if line[0] != "lo:"]
    return sum(received for received, _ in counts), sum(sent for _, sent in counts)
