"""Forks ranks from a process that has imported a framework once: ``fork_server.py torch|tensorflow``.

Each line of its input is a job: who is forked, what it runs, for how long at the most. Each line of its output says how
the ranks ended. A rank is a process of its own, with its own session, output, Horovod and end; what it does not have to
do again is the import, which takes longer than most of these jobs.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import sys
import tempfile
import time
import types
from typing import Any, NamedTuple

RUNNERS = ("sklearn.datasets", "PIL.Image", "tensorboard.summary.writer.event_file_writer")
"""Modules that the runners import besides."""
MODULES = {
    "torch": ("torch._dynamo", "hvd_async.torch", *RUNNERS),  # (torch's first optimizer imports it)
    "tensorflow": ("keras", "horovod.tensorflow.keras", "hvd_async.tensorflow.keras", *RUNNERS),
}
STACKS = 2.0
"""Seconds that ranks have to print where they are, when a job has run out of time."""


class Rank(NamedTuple):
    """The process that is to be forked."""

    command: list[str]
    environment: dict[str, str]
    log: str
    folder: str


def serve() -> Rank | None:
    """Run jobs until the input ends. In a forked process: return the rank that it is to be, at once."""
    for line in sys.stdin:
        job = json.loads(line)
        started: dict[int, int] = {}
        for number, rank in enumerate(job["ranks"]):
            pid = os.fork()
            if pid == 0:
                return Rank(**rank)
            started[pid] = number
        print(json.dumps(wait(started, job["timeout"])), flush=True)
    return None


def wait(ranks: dict[int, int], timeout: float) -> dict[str, list[Any]]:
    """The ranks' exit codes and the times of their ends, by rank; None for those that had to be killed."""
    ends = select.poll()
    pids = {os.pidfd_open(pid): pid for pid in ranks}
    for descriptor in pids:
        ends.register(descriptor, select.POLLIN)
    codes: list[int | None] = [None] * len(ranks)
    exited = [0.0] * len(ranks)
    deadline = time.monotonic() + timeout
    overdue = False
    while pids:
        ended = ends.poll(1000 * max(0.0, deadline - time.monotonic()))
        for descriptor, _ in ended:
            pid = pids.pop(descriptor)
            ends.unregister(descriptor)
            os.close(descriptor)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            codes[ranks[pid]], exited[ranks[pid]] = None if overdue else status, time.time()
        if not ended:
            for pid in pids.values():
                os.kill(pid, signal.SIGKILL if overdue else signal.SIGUSR1)
            overdue, deadline = True, time.monotonic() + STACKS
    return {"codes": codes, "exited": exited}


def become(rank: Rank) -> str:
    """Make this process the rank; returns the script that it is to run."""
    os.setsid()
    os.chdir(rank.folder)
    os.environ.clear()
    os.environ.update(rank.environment)
    for descriptor, name, mode in ((0, os.devnull, os.O_RDONLY), (1, rank.log, os.O_WRONLY | os.O_CREAT)):
        opened = os.open(name, mode, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.dup2(1, 2)
    tempfile.tempdir = None  # (the server's own, if an import has asked for it)
    sys.argv = rank.command
    sys.path[0] = os.path.dirname(rank.command[0])
    return rank.command[0]


if __name__ == "__main__":
    for module in MODULES[sys.argv[1]]:
        importlib.import_module(module)
    gc.freeze()  # else every rank looks at all that was imported once more when it ends, for a second
    forked = serve()
    if forked is not None:
        script = become(forked)
        # As the interpreter runs a script: nothing of this file is on the stack when it ends.
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        main.__file__ = script
        with open(script, encoding="utf-8") as source:
            code = compile(source.read(), script, "exec", dont_inherit=True)
        exec(code, vars(main))
