"""Recorder of a rank's steps, called by the training thread; it writes a trace file in batches of lines."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from hvd_async.runtime import launch
from hvd_async.runtime.addresses import own_seat
from hvd_async.runtime.log import warn
from hvd_async.traces.format import PLAIN, VERSION, Header, Step, file_of

BUFFERED = 512
"""Maximum number of buffered steps."""
WRITES_EACH = 2.0
"""Seconds after which fewer steps are written, since a job may be killed."""
LAUNCHES = ("HOROVOD_GLOO_RENDEZVOUS_PORT", "PMIX_NAMESPACE", "SLURM_STEP_ID", "MASTER_PORT")
"""Variables that launchers set to one value on all ranks, usually a new one per run; the first one that is set counts.

They belong to horovodrun on Gloo and compatible launchers; Open MPI, and SLURM with PMIx; SLURM; torchrun.
"""


class Recorder:
    """Recorder of one rank's marks, for your own loop; ``hvd_async.torch.record`` sets them for an optimizer.

    In each step call ``arrived()`` when the gradients are ready, ``released()`` when those of all ranks are (optional),
    and ``done()`` at the end of the step; or only ``stepped()``. The time between ``done()`` and the next ``arrived()``
    counts as computation, reading data included. Call ``skip()`` after what belongs to no step, such as an evaluation.

    Args:
        folder: of the trace, created if missing. This rank's file of an earlier run is replaced; files of ranks that
            the job does not have are removed.
        rank: number of this rank, from 0.
        ranks: number of ranks of the job.
        framework: a name, for reports.
        algorithm, options: of the optimizer; see ``Header``.
        parameter_bytes: of the trained parameters.
        buckets: number of parts in which gradients are sent; 0: unknown.
        synchronized: whether the device is synchronized before each mark.
        run: identifies the run, the same on all ranks; None: taken from the launcher's variables.
        clock: returns monotonic seconds.

    Raises:
        ValueError: ``rank`` is not below ``ranks``.
        OSError: the folder cannot be written.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        rank: int,
        ranks: int,
        framework: str = "own loop",
        algorithm: str = PLAIN,
        options: Mapping[str, Any] | None = None,
        parameter_bytes: int = 0,
        buckets: int = 0,
        synchronized: bool = True,
        run: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not 0 <= rank < ranks:
            raise ValueError(f"rank must be from 0 to {ranks - 1}, got rank {rank} of {ranks}")
        seat = own_seat(launch.known(os.environ))
        self.header = Header(
            version=VERSION,
            rank=rank,
            ranks=ranks,
            host=seat.host,
            framework=framework,
            algorithm=algorithm,
            options=_plain(options or {}),
            parameter_bytes=parameter_bytes,
            buckets=buckets,
            synchronized=synchronized,
            run=run or launched(os.environ),
            node=seat.node,
            local_rank=seat.local_rank,
        )
        self._clock, self._origin = clock, time.time() - clock()
        self._begin: float | None = clock()
        self._written = self._begin
        self._arrived: float | None = None
        self._released: float | None = None
        self._waited = 0.0
        self._steps: list[Step] = []
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        _remove_beyond(path, ranks)
        own = file_of(path, rank)
        own.unlink(missing_ok=True)  # not truncated: an earlier recorder may still have it open, with lines to write
        self._ends = contextlib.ExitStack()
        self._file = self._ends.enter_context(own.open("wb"))
        self._file.write(msgspec.json.encode(self.header) + b"\n")
        self._file.flush()

    def arrived(self, waited_s: float = 0.0) -> None:
        """Mark that this step's gradients are ready. The first mark of a step counts.

        Args:
            waited_s: seconds that the rank has already waited since then.
        """
        if self._arrived is None:
            now = self._clock()
            self._arrived = max(now - waited_s, now if self._begin is None else self._begin)

    def released(self, waited_s: float | None = None) -> None:
        """Mark the end of the wait. The last mark of a step counts.

        Args:
            waited_s: seconds of the wait, if known; None: since the arrival.
        """
        if self._arrived is not None:
            self._released = self._clock() if waited_s is None else min(self._arrived + waited_s, self._clock())

    def waited(self, seconds: float) -> None:
        """Mark the end of one of several waits in a step, such as one per layer.

        They are recorded as a single wait, as long as all of them together, which ends with the last one.

        Args:
            seconds: duration of the wait that ends now.
        """
        self._waited += seconds
        self._released = self._clock()
        begin = self._released if self._begin is None else self._begin
        self._arrived = max(self._released - self._waited, begin)

    def done(self) -> None:
        """Mark the end of the step, and begin the next one."""
        now = self._clock()
        if self._begin is not None and self._arrived is not None:
            origin, released = self._origin, self._arrived if self._released is None else self._released
            self._steps.append(Step(origin + self._begin, origin + self._arrived, origin + released, origin + now))
        self._next(now)
        if len(self._steps) >= BUFFERED or now - self._written >= WRITES_EACH:
            self.flush()

    def stepped(self, waited_s: float) -> None:
        """Mark the end of a step without any other mark.

        Args:
            waited_s: seconds that the rank has waited in it, assumed to be at its end; the rest is computation.
        """
        now = self._clock()
        begin = now if self._begin is None else self._begin
        self._arrived = max(begin, now - waited_s)
        self._released = now
        self.done()

    def skip(self) -> None:
        """Leave out the time since the last ``done()``: the next step begins now."""
        self._next(self._clock())

    def _next(self, now: float) -> None:
        """Begin the next step."""
        self._begin, self._arrived, self._released, self._waited = now, None, None, 0.0

    def flush(self) -> None:
        """Write the buffered steps; if that fails, end the recording with a warning: training continues."""
        steps, self._steps, self._written = self._steps, [], self._clock()
        if self._file.closed:
            return
        try:
            self._file.write(b"".join(msgspec.json.encode(step) + b"\n" for step in steps))
            self._file.flush()
        except OSError as error:
            warn(f"record: later steps are not recorded, since {self._file.name} cannot be written: {error}")
            with contextlib.suppress(OSError):  # (it writes what is buffered)
                self._ends.close()

    def close(self) -> None:
        """Write the buffered steps, and close the file; nothing is recorded afterwards."""
        self.flush()
        self._ends.close()


@contextlib.contextmanager
def unless_it_cannot_be_recorded() -> Iterator[None]:
    """Warn instead of ending a script that only happens to be recorded."""
    try:
        yield
    except (OSError, ValueError) as error:
        warn(f"record: this rank is not recorded: {error}")


def launched(environment: Mapping[str, str]) -> str | None:
    """Return an identifier of the launch, equal on all its ranks; None if the launcher is unknown."""
    name = next((name for name in LAUNCHES if environment.get(name)), None)
    if name is None:
        return None
    job = [environment.get("SLURM_JOB_ID", "")] if name == "SLURM_STEP_ID" else []
    return ":".join([name, *job, environment[name]])


def _remove_beyond(folder: Path, ranks: int) -> None:
    """Remove files of ranks that only an earlier run had, which no rank of this run would replace."""
    for path in folder.glob("rank.*.jsonl"):
        number = path.name.split(".")[1]
        if number.isdecimal() and int(number) >= ranks:
            path.unlink(missing_ok=True)  # (another rank may have removed it)


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as JSON values; anything else as its ``repr``."""
    encoded = msgspec.json.encode(dict(options), enc_hook=repr)
    return cast("dict[str, Any]", msgspec.json.decode(encoded))
