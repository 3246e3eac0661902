"""Start a job under a launcher, take in its results block by block, and leave no process behind.

The launcher is horovodrun, or torchrun if there is no Horovod and ``HVD_ASYNC_TRANSPORT`` is torch.

A job is a module of ``jobs/``. A JSON file, its plan, says what it is to do; the digits lie next to it. It answers by
lines of JSON in another file, one per block, which is also how progress is known. All its processes carry a mark in
their environment, by which they are found when the job has to be ended.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil

from hvd_async.runtime.data_plane import find_horovod

from . import data
from .arms import WARM_UP
from .figures import Block
from .report import Say

SCRIPTS = Path(__file__).resolve().parents[2]
VIRTUAL = SCRIPTS / "virtual_cluster.py"
SPARE = 200
"""Hosts that an elastic job may have."""
ROOT = SCRIPTS.parent
MARK = "HVD_ASYNC_BENCH_JOB"
ENOUGH = "enough"
"""File in the job's folder that tells it to do no more repetitions."""
GOODBYE = 15.0
"""Seconds that processes may take to end unforced."""
START = 180.0
"""Seconds that a job may take to start: eight processes import torch."""
TRACED = 5
"""Steps of each arm that a profiler looks at."""
SPAN = "hvd_async.steps"
"""The steps' name in the profiler."""
LOOK = 0.25
"""Seconds between two looks at the results."""
Arm = TypeVar("Arm")


class JobError(RuntimeError):
    """A job failed, or ran out of time; the message begins with the end of its output."""


class NotHereError(JobError):
    """This machine lacks what a job needs; the message says what."""


def run(
    job: str,
    ranks: int,
    plan: dict[str, Any],
    *,
    limit: float,
    on_block: Callable[[Block], None] | None = None,
    while_running: Callable[[Path], None] | None = None,
    env: dict[str, str] | None = None,
    mbit: float | None = None,
    virtual: bool = False,
    per_host: int = 1,
    elastic: bool = False,
) -> list[Block]:
    """Run a job to its end, and return its blocks.

    Args:
        job: the module's name in ``jobs/``.
        ranks: how many.
        plan: what the job is to do; everything in it must be JSON.
        limit: seconds; a job that takes longer is ended.
        on_block: called with every block as it comes.
        while_running: called with the job's folder several times a second.
        env: added to the environment.
        mbit: bandwidth of each virtual host's link, Mbit/s; None: no limit.
        virtual: ranks are on virtual hosts also without a limit; else all are on this machine.
        per_host: ranks of a virtual host, or of any host of an elastic job.
        elastic: hosts are lines of the file ``hosts`` in the job's folder; ``hosts.spare`` has more. They are virtual
            ones, or names of this machine.

    Raises:
        NotHereError: there are no virtual hosts here.
        JobError: it failed or ran out of time.
    """
    virtual = virtual or mbit is not None
    if virtual:
        _check_virtual_hosts()
    with tempfile.TemporaryDirectory(prefix="hvd_async_bench_") as name:
        folder = Path(name)
        (folder / "plan.json").write_text(json.dumps(plan))
        data.leave(folder)
        starts, mark = _command(folder, ranks, virtual, mbit, per_host, elastic), uuid.uuid4().hex
        with (folder / "output").open("wb") as output, _swept(mark, virtual):
            launcher = subprocess.Popen(
                [*starts, sys.executable, "-m", "scripts.benchmarks.jobs", job],
                cwd=ROOT,
                env=_environment(mark, folder, env or {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            blocks = _follow(launcher, folder, time.monotonic() + limit, on_block, while_running)
            late = launcher.poll() is None
        code = launcher.wait(GOODBYE)
        if code != 0 or (folder / "unfinished").exists():
            output_end = (folder / "output").read_text(errors="replace")[-20_000:]
            ended = f"by force after {limit:.0f} s" if late else f"with exit code {code}"
            raise JobError(f"{output_end}\nthe job {job} at {ranks} ranks ended {ended}; above is its last output")
        return blocks


def _command(folder: Path, ranks: int, virtual: bool, mbit: float | None, per_host: int, elastic: bool) -> list[str]:
    """Return the command that starts as many ranks of what follows it."""
    hosts, begin = folder / "hosts", ranks // per_host
    if virtual:
        limit = [] if mbit is None else [f"--mbit={mbit:g}"]
        where = [f"--hosts={SPARE}", f"--elastic={hosts}", f"--np={begin}"] if elastic else [f"--hosts={begin}"]
        return [sys.executable, str(VIRTUAL), *where, f"--per-host={per_host}", *limit, "--"]
    if not elastic and os.environ.get("HVD_ASYNC_TRANSPORT") == "torch" and find_horovod() is None:
        number = ["--standalone", "--nproc-per-node", str(ranks), "--no-python"]
        return [sys.executable, "-m", "torch.distributed.run", *number]
    command = [str(Path(sys.executable).parent / "horovodrun"), "-np", str(ranks), "--gloo"]
    if not elastic:
        return command
    # Names of 127.0.0.1: Horovod lets no host in again on which a process has died. (A label has 63 letters at most.)
    names = [f"0x{'0' * (number // 50)}7f.0x{'0' * (number % 50)}1:{per_host}\n" for number in range(SPARE)]
    hosts.write_text("".join(names[:begin]))
    hosts.with_name("hosts.spare").write_text("".join(names[begin:]))
    discovery = folder / "discover"
    discovery.write_text(f"#!/bin/sh\ncat {hosts}\n")
    discovery.chmod(0o755)
    numbers = ["--min-np", "1", "--max-np", str(4 * ranks), "--network-interfaces", "lo"]
    return [*command, *numbers, "--host-discovery-script", str(discovery)]


def _check_virtual_hosts() -> None:
    if os.geteuid() != 0:
        raise NotHereError("its ranks are on virtual hosts, which need root")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise NotHereError(f"its ranks are on virtual hosts, which need {' and '.join(missing)}: install iproute2")


def _environment(mark: str, folder: Path, more: dict[str, str]) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD_", "OMPI_"))}
    binaries = str(Path(sys.executable).parent)
    return {
        **inherited,
        "PATH": f"{binaries}{os.pathsep}{inherited.get('PATH', '')}",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",  # all arms go through the CPU and Gloo
        MARK: mark,
        data.FOLDER: str(folder),
        **more,
    }


def _follow(
    launcher: subprocess.Popen[bytes],
    folder: Path,
    deadline: float,
    on_block: Callable[[Block], None] | None,
    while_running: Callable[[Path], None] | None,
) -> list[Block]:
    """Take in blocks until the launcher has ended, or is to be ended."""
    blocks: list[Block] = []
    results, read = folder / "blocks.jsonl", 0
    while True:
        ended = launcher.poll() is not None
        if results.exists():
            complete = results.read_text().rpartition("\n")[0].splitlines()
            for line in complete[read:]:
                blocks.append(json.loads(line))
                if on_block is not None:
                    on_block(blocks[-1])
            read = len(complete)
        if ended or time.monotonic() > deadline:
            return blocks
        if while_running is not None:
            while_running(folder)
        time.sleep(LOOK)


# -- no process is left ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _swept(mark: str, virtual: bool) -> Iterator[None]:
    """Context that no process with this mark outlives, nor a virtual host, whatever happens inside."""

    def stop(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
        _, alive = psutil.wait_procs(_processes(mark), timeout=0.0)
        if alive:
            psutil.wait_procs(alive, timeout=1.0)
    finally:
        signal.signal(signal.SIGTERM, before)
        deadline = time.monotonic() + GOODBYE
        while (alive := _processes(mark)) and time.monotonic() < deadline:
            for process in alive:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()  # also ends one that is stopped
            psutil.wait_procs(alive, timeout=2.0)
        if virtual:
            subprocess.run([sys.executable, str(VIRTUAL), "--clean"], check=True)


def _processes(mark: str) -> list[psutil.Process]:
    """Return this job's processes, zombies aside."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile, or is not ours to look at
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


# -- blocks of a case --------------------------------------------------------------------------------------------------


class Progress:
    """Says what is done, and how long the rest may take.

    Args:
        total: number of blocks; fewer if an earlier run has kept results.
        say: takes a line of text.

    Attributes:
        ends: time of the monotonic clock after which no block begins; None: all are done.
    """

    def __init__(self, total: int, say: Say) -> None:
        self.total, self._say = total, say
        self.ends: float | None = None
        self._done, self._started = 0, time.monotonic()
        self._first: float | None = None

    def __call__(self, text: str) -> None:
        """Count one more block as done."""
        now = time.monotonic()
        self._done += 1
        if self._first is None:
            self._first = now
        # The first block's time has the job's start in it, so the rest is reckoned by those after it.
        each = (now - self._first) / (self._done - 1) if self._done > 1 else now - self._started
        left = max(0, self.total - self._done) * each
        left = left if self.ends is None else min(left, max(0.0, self.ends - now))
        self._say(f"[{self._done}/{self.total}] {text}; {left / 60:.1f} min left")


class Kept:
    """Results of blocks in a file, a line of JSON each: a run that was ended continues with what is left.

    Args:
        path: the file, which may not exist; None: results are kept in memory only.
        how: settings of the run that blocks do not have themselves, as JSON.
    """

    def __init__(self, path: Path | None, how: Any = None) -> None:
        self._path, self._how, self._found = path, how, dict[str, Block]()
        if path is not None and path.exists():
            complete = path.read_text().rpartition("\n")[0]
            path.write_text(f"{complete}\n" if complete else "")  # the last line was cut off if a run was killed
            self._found = dict(map(json.loads, complete.splitlines()))

    def of(self, asked: Block) -> Block | None:
        return self._found.get(self._key(asked))

    def add(self, asked: Block, found: Block) -> None:
        self._found[self._key(asked)] = found
        if self._path is not None:
            with self._path.open("a") as lines:
                lines.write(json.dumps([self._key(asked), found]) + "\n")

    def _key(self, asked: Block) -> str:
        return hashlib.sha256(json.dumps([self._how, asked], sort_keys=True).encode()).hexdigest()


def measure(
    args: argparse.Namespace,
    job: str,
    blocks: list[Block],
    say: Say,
    tell: Callable[[Block], str],
    *,
    seconds: float,
    ranks: int | None = None,
    progress: Progress | None = None,
    plan: dict[str, Any] | None = None,
    enough: Callable[[list[Block]], bool] | None = None,
    **how: Any,
) -> list[Block]:
    """Run blocks in one job, except those whose results an earlier run has kept, and tell of each as it comes.

    Args:
        args: the command line: ``ranks``, the ``limit`` in minutes, if one was given, and the file to ``resume`` from.
        job: the module's name in ``jobs/``.
        blocks: what to do.
        say: takes a line of text.
        tell: puts a block's result in words.
        seconds: how long the job may take if the command line does not say.
        ranks: of the job, if they are not the command line's.
        progress: of several jobs together; None: of this one.
        plan: content of the plan without the blocks.
        enough: asked after each block whether these results are enough; the job then ends after this repetition.
        how: further arguments of ``run``.
    """
    ranks = ranks or args.ranks
    kept = Kept(args.resume, [job, ranks, plan, how])
    left = [block for block in blocks if kept.of(block) is None]
    progress = progress or Progress(len(blocks), say)
    progress.total -= len(blocks) - len(left)
    asked, found = iter(left), list[Block]()  # results come in this order

    def on_block(block: Block) -> None:
        kept.add(next(asked), block)
        found.append(block)
        progress(tell(block))

    def look(folder: Path) -> None:
        if enough is not None and not (folder / ENOUGH).exists() and enough(found):
            (folder / ENOUGH).touch()

    if left:
        limit = seconds if enough is not None or not args.limit else args.limit * 60
        asks = {"blocks": left, "may_end": enough is not None, **(plan or {})}
        run(job, ranks, asks, limit=limit, on_block=on_block, while_running=look, **how)
    return [result for result in map(kept.of, blocks) if result is not None]


def repetitions(arms: Sequence[Arm], count: int) -> list[tuple[int, Arm]]:
    """Return (repetition, arm) in alternation; each repetition begins with another arm."""
    order = []
    for repetition in range(count):
        first = repetition % len(arms)
        order += [(repetition, arm) for arm in (*arms[first:], *arms[:first])]
    return order


def block_of(arm: str, repetition: int, task: dict[str, Any], **more: Any) -> Block:
    """Return a block of the timed jobs; ``jobs/timed.py`` says what it may have."""
    return {"arm": arm, "repetition": repetition, "seed": 0, "untimed": WARM_UP, "lr": 0.001, "task": task} | more
