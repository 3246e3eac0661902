"""Programs with a time limit, of which no process is left behind: imports may crash or hang, and so may jobs."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from hvd_async.errors import EngineError

MARK = "HVD_ASYNC_DOCTOR_RUN"
"""Environment variable by which the processes of a run are found, also those that their launcher has lost."""
RESULT = "hvd_async doctor result: "
"""The beginning of a line with a result, after what a launcher may put before it; JSON follows."""
GOODBYE = 5.0
"""Seconds that processes may take to end when they are told to."""


@dataclass(frozen=True)
class Outcome:
    """A program's end and its output.

    Attributes:
        returncode: its exit status, minus the signal's number if one killed it; None: its time ran out.
        output: standard output and standard error, mixed.
        seconds: from start to end.
    """

    returncode: int | None
    output: str
    seconds: float

    def results(self) -> list[dict[str, Any]]:
        """Return the results that the program has told, in order (see ``tell``)."""
        found = []
        for line in self.output.splitlines():
            _, told, text = line.partition(RESULT)
            if told:  # (a launcher may put what comes next on the same line)
                found.append(dict(json.JSONDecoder().raw_decode(text)[0]))
        return found

    def ending(self, limit: float) -> str:
        """Return how the program ended, in words, with its last error if there is one.

        Args:
            limit: seconds it was given.
        """
        if self.returncode is None:
            how = f"not done within {limit:g} s"
        elif self.returncode < 0:
            how = f"killed by signal {-self.returncode}"
        else:
            how = f"exit status {self.returncode}"
        error = last_error(self.output)
        return f"{how}: {error}" if error else how


def tell(result: Mapping[str, Any]) -> None:
    """Print a result for the program that has started this one."""
    print(RESULT + json.dumps(result), flush=True)


def last_error(output: str) -> str:
    """Return the last line of an output that looks like an exception, without a launcher's prefix; else nothing."""
    for line in reversed(output.splitlines()):
        text = line.rpartition(">:")[2].strip()
        kind = text.partition(":")[0]
        if kind.endswith(("Error", "Exception")) and " " not in kind:
            return text[:300]
    return ""


def run_limited(command: Sequence[str], limit: float, env: Mapping[str, str] | None = None) -> Outcome:
    """Run a program, and end it and all that it has started when its time is up.

    Args:
        command: program and arguments.
        limit: seconds.
        env: the whole environment; None: this process's.

    Raises:
        EngineError: the program cannot be started.
    """
    mark = uuid.uuid4().hex
    began = time.monotonic()
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                list(command),
                env={**(os.environ if env is None else env), MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise EngineError(f"{command[0]} cannot be started: {error}") from error
        code: int | None
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
            process.terminate()
        finally:
            _end(mark)
            process.wait(GOODBYE)
        output.seek(0)
        text = output.read().decode(errors="replace")
    return Outcome(code, text, time.monotonic() - began)


def _end(mark: str) -> None:
    """Wait a little for the processes of a run to end, then kill those that have not."""
    psutil.wait_procs(_marked(mark), timeout=GOODBYE)
    left = _marked(mark)
    for process in left:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(left, timeout=GOODBYE)


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:  # it has ended, or is another user's
            continue
    return found
