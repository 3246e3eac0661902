"""One rank of a job: the plan, meeting the other ranks, timing a block, recording what was found. No framework here.

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
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec
import psutil

from ..support.data import FOLDER
from ..support.launch import ENOUGH

faulthandler.register(signal.SIGUSR1, all_threads=True)  # to see where a job hangs
RISING = 0.1
"""Share of the steps in which the learning rate rises from 0; then it falls as a cosine."""
Block = dict[str, Any]
"""An arm with its settings; ``timed`` says what it has."""


class Job:
    """One rank of a job.

    Args:
        hvd: the binding's module, initialised.
        barrier: waits for all ranks without keeping a core busy.

    Attributes:
        rank, size: of the job.
        folder: the job's.
        plan: what the job is to do.
        barrier: as above.
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
        """Return every rank's value, on every rank.

        By files: Horovod's functions of objects ask without end whether they are done, and where ranks share cores the
        threads that they wait for may get none, for longer than Gloo's limit of 30 s.
        """
        self._gathered += 1
        files = [self.folder / f"gathered.{self._gathered}.{rank}" for rank in range(self.size)]
        files[self.rank].write_bytes(pickle.dumps(value))
        self.barrier()
        (self.folder / f"gathered.{self._gathered - 1}.{self.rank}").unlink(missing_ok=True)  # (all have read it)
        return [pickle.loads(file.read_bytes()) for file in files]

    def agree(self, value: Any) -> Any:
        """Return rank 0's value, on every rank."""
        return self.gather(value)[0]

    def same(self, content: bytes) -> bool:
        """Return whether all ranks have the same content, bit for bit. Collective."""
        return len(set(self.gather(hashlib.sha256(content).hexdigest()))) == 1

    def record(self, block: Block, own: dict[str, Any]) -> None:
        """Write a block: what was asked, without its times, and what every rank found."""
        found = self.gather(own)
        if self.rank == 0:
            asked = {key: value for key, value in block.items() if key != "times"}
            with (self.folder / "blocks.jsonl").open("a") as results:
                results.write(json.dumps({**asked, "by_rank": found}) + "\n")

    def each_block(self, run_block: Callable[[Job, Block], None]) -> None:
        """Run the plan's blocks; if enough repetitions are done, those alone that say ``always``."""
        begun, ended = None, False
        for block in self.plan["blocks"]:
            if self.plan.get("may_end") and block["repetition"] != begun:
                begun = block["repetition"]
                ended = self.agree((self.folder / ENOUGH).exists())
            if not ended or block.get("always"):
                run_block(self, block)

    def finish(self) -> None:
        """End the job: call it last."""
        self.barrier()
        if self.rank == 0:
            (self.folder / "unfinished").unlink()


# -- a block that is timed ---------------------------------------------------------------------------------------------


class Trainer(Protocol):
    """A model under an arm, on this rank.

    Attributes:
        waited: seconds that the training thread has waited for others so far.
        computed: seconds of each step until its gradients were there.
    """

    computed: list[float]

    @property
    def waited(self) -> float: ...

    def step(self, seconds: float) -> None:
        """Take a step that computes for some seconds."""

    def stats(self) -> dict[str, Any]:
        """Return ``stats()`` as JSON; nothing of a rival."""

    def drain(self) -> None: ...

    def identical(self) -> bool: ...

    def close(self) -> None: ...


class WallClock:
    """Seconds since ``start``, as this rank sees them.

    Attributes:
        started: time of the start, by the machine's clock.
        laps: seconds until the end of each step.
    """

    def __init__(self) -> None:
        self.started, self.laps = 0.0, list[float]()

    def start(self) -> None:
        self.started = time.perf_counter()

    def lap(self) -> float:
        self.laps.append(time.perf_counter() - self.started)
        return self.laps[-1]

    def stop(self) -> None:
        """Complete ``laps``."""


def timed(
    job: Job,
    block: Block,
    trainer: Trainer,
    *,
    clock: WallClock | None = None,
    record: Callable[[], Any] | None = None,
    on_step: Callable[[int], None] | None = None,
    before_drain: Callable[[], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Train as a block says, drain, and return this rank's figures.

    A block has ``steps`` (a number, or one for each rank) or a ``window`` of seconds in which each rank takes as many
    as it can; ``untimed`` steps before; ``times``, [steps][ranks], the seconds that each step computes; ``keep``: the
    model stays for further blocks, nothing is drained before the clock starts, and as much is in flight at its end.

    Args:
        job: this rank.
        block: see above.
        trainer: the model.
        clock: another clock.
        record: begins to record the timed steps; what it returns is closed after the drain.
        on_step: called after each timed step with its number, from 1 on.
        before_drain: returns more figures, of what is so until the drain.
    """
    clock, times = clock or WallClock(), [row[job.rank] for row in block.get("times", ())]
    job.barrier()
    for _ in range(block["untimed"]):
        trainer.step(0.0)
    if not block.get("keep"):
        trainer.drain()
        job.barrier()
    recorder = record() if record is not None else None
    most, window, done = steps_of(block, job.rank), block.get("window"), 0
    first, stats, used = len(trainer.computed), trainer.stats(), _used(trainer)
    clock.start()
    while most is None or done < most:
        trainer.step(times[done % len(times)] if times else 0.0)
        now, done = clock.lap(), done + 1
        if on_step is not None:
            on_step(done)
        if window is not None and now >= window:
            break
    after = trainer.stats()  # before the drain: what it carries was not produced at the speed that is measured
    clock.stop()
    own = {"ends": clock.laps, "stats": difference(after, stats), "rounds_before": stats.get("rounds", 0)}
    own |= difference(_used(trainer), used) | {"latency_s": latency(stats, after)}
    own["computed"] = [round(seconds, 5) for seconds in trainer.computed[first:]]
    own |= before_drain() if before_drain is not None else {}
    trainer.drain()
    if recorder is not None:
        recorder.close()
    return own


def steps_of(block: Block, rank: int) -> int | None:
    """Return a rank's steps; None: all that it can."""
    steps = block.get("steps")
    return steps[rank] if isinstance(steps, list) else steps


def conclude(job: Job, block: Block, trainer: Trainer, own: dict[str, Any]) -> None:
    """End a block: record the figures; unless the model is kept, compare the ranks' weights and stop its engine."""
    if not block.get("keep"):
        own["identical"] = trainer.identical()
        trainer.close()
    job.record(block, own)


def _used(trainer: Trainer) -> dict[str, float]:
    """Return the seconds of waiting and of CPU so far, and the bytes that this host has sent, the loopback aside."""
    sent = sum(nic.bytes_sent for name, nic in psutil.net_io_counters(pernic=True).items() if name != "lo")
    found = {"waited": trainer.waited, "sent": sent, "cpu": time.process_time()}
    for thread in threading.enumerate():
        if thread.name.startswith("hvd_async-engine") and thread.ident is not None:
            found["engine_s"] = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
            break
    return found


def rate(highest: float, step: int, steps: int) -> float:
    """Return the learning rate of a step: up in a line, then down as a cosine."""
    up = RISING * steps
    if step < up:
        return highest * (step + 1) / up
    return highest * 0.5 * (1 + math.cos(math.pi * (step - up) / (steps - up)))


def counted(stats: Any) -> dict[str, Any]:
    """Return ``stats()`` as JSON, without the history of leaders."""
    kept = {key: value for key, value in vars(stats).items() if key != "history"}
    found: dict[str, Any] = msgspec.to_builtins(kept, str_keys=True, enc_hook=str)
    return found


def difference(after: Any, before: Any) -> Any:
    """Return the counts since ``before``, in numbers, lists and dictionaries alike."""
    if isinstance(after, dict):
        return {key: difference(value, before.get(key) if before else None) for key, value in after.items()}
    if isinstance(after, list):
        earlier = before if before else [0] * len(after)
        return [difference(a, b) for a, b in zip(after, earlier, strict=True)]
    if isinstance(after, int | float) and not isinstance(after, bool):
        return after - (before or 0)
    return after


def latency(before: dict[str, Any], after: dict[str, Any]) -> float | None:
    """Return the mean seconds of an exchange, round or pull in between; None if there was none."""
    count = next((name for name in ("exchanges", "pulls") if name in after), "rounds")
    mean = "pull_s" if count == "pulls" else "latency_s"
    if after.get(count, 0) == before.get(count, 0) or mean not in after:
        return None
    seconds = after[mean] * after[count] - before[mean] * before[count]
    return float(seconds / (after[count] - before[count]))
