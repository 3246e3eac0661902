"""Programs that the doctor and the demo run in separate processes, since imports and jobs may crash or hang.

``python -m hvd_async.doctor.programs COMMAND`` is one of these programs:

- ``ask FRAMEWORK`` imports torch or tensorflow, then Horovod's module for it, and reports their features;
- ``train FRAMEWORK`` is a rank of the self-test;
- ``measure`` is a rank that measures the network;
- ``demo FOLDER STEPS`` is a rank of the demo;
- ``horovodrun ...`` is Horovod's launcher.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil

from hvd_async.errors import EngineError

PROGRAM = "hvd_async.doctor.programs"
"""Name of this module, for ``python -m``."""
MARK = "HVD_ASYNC_DOCTOR_RUN"
"""Environment variable that identifies the processes of a run, including orphans of their launcher."""
RESULT = "hvd_async doctor result: "
"""Start of a line with a result in JSON; a launcher may put a prefix before it."""
GOODBYE = 5.0
"""Seconds that processes have to end after a request."""


# -- a program with a time limit ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """Outcome of a program.

    Attributes:
        returncode: exit status, or minus the number of the signal that killed it; None: its time ran out.
        output: standard output and standard error, mixed.
        seconds: from start to end.
    """

    returncode: int | None
    output: str
    seconds: float

    def results(self) -> list[dict[str, Any]]:
        """Return the results that the program has reported, in order."""
        texts = [text for line in self.output.splitlines() for _, found, text in [line.partition(RESULT)] if found]
        return [json.JSONDecoder().raw_decode(text)[0] for text in texts]  # (launchers may append to the line)

    def ending(self, limit: float) -> str:
        """Return a human-readable text of how the program ended, with the last exception in its output.

        Args:
            limit: its time limit, seconds.
        """
        if self.returncode is None:
            how = f"not done within {limit:g} s"
        elif self.returncode < 0:
            how = f"killed by signal {-self.returncode}"
        else:
            how = f"exit status {self.returncode}"
        for line in reversed(self.output.splitlines()):
            text = line.rpartition(">:")[2].strip()  # (without a launcher's prefix)
            kind = text.partition(":")[0]
            if kind.endswith(("Error", "Exception")) and " " not in kind:
                return f"{how}: {text[:300]}"
        return how


def report(result: Mapping[str, Any]) -> None:
    """Print a result for the process that has started this program."""
    print(RESULT + json.dumps(result), flush=True)


def run_limited(command: Sequence[str], limit: float, environment: Mapping[str, str] = os.environ) -> Outcome:
    """Run a program; when it ends or its time runs out, end all processes that it has started.

    Args:
        command: program and arguments.
        limit: seconds.
        environment: the complete environment of the program.

    Raises:
        EngineError: the program cannot be started.
    """
    mark = uuid.uuid4().hex
    began = time.monotonic()
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                list(command),
                env={**environment, MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise EngineError(f"{command[0]} cannot be started: {error}") from error
        code: int | None = None
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.terminate()
        finally:
            psutil.wait_procs(_marked(mark), timeout=GOODBYE)
            left = _marked(mark)
            for one in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            psutil.wait_procs(left, timeout=GOODBYE)
            process.wait(GOODBYE)
        output.seek(0)
        text = output.read().decode(errors="replace")
    return Outcome(code, text, time.monotonic() - began)


def _marked(mark: str) -> list[psutil.Process]:
    """Return the processes of a run."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:  # it has ended, or is another user's
            continue
    return found


# -- jobs on the CPUs of hosts -----------------------------------------------------------------------------------------


def launch_command(transport: str, ranks: int, arguments: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """Return the command that starts ranks, each of which is this program.

    Args:
        transport: ``gloo`` or ``mpi``, of Horovod; ``torch`` for torch.distributed, under ``torchrun``.
        ranks: number of ranks.
        arguments: of this program.
        options: of ``horovodrun``.
    """
    program = ["-m", PROGRAM]
    if transport == "torch":
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        return [sys.executable, *torchrun, *program, *arguments]
    if transport == "mpi":
        options = ["--mpi-args=--oversubscribe", *options]
    horovodrun = [*program, "horovodrun", "-np", str(ranks), f"--{transport}", *options]
    return [sys.executable, *horovodrun, sys.executable, *program, *arguments]


def run_job(command: Sequence[str], limit: float) -> Outcome:
    """Run a job as ``run_limited`` does, on CPUs and with one thread per rank."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD_RANK", "HOROVOD_SIZE"))}
    environment = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "TF_ENABLE_ONEDNN_OPTS": "1",
        **kept,
        "OMP_NUM_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONUNBUFFERED": "1",
    }
    return run_limited(command, limit, environment)


# -- the programs ------------------------------------------------------------------------------------------------------


def ask(framework: str) -> None:
    """Report the version and GPUs of ``torch`` or ``tensorflow``, then the transports that Horovod has for it."""
    module = importlib.import_module(framework)
    if framework == "torch":
        gpus, cuda = module.cuda.device_count(), module.version.cuda or ""
    else:
        gpus = len(module.config.list_physical_devices("GPU"))
        cuda = str(module.sysconfig.get_build_info().get("cuda_version", ""))
    report({"step": "framework", "version": str(module.__version__), "gpus": gpus, "cuda": cuda})
    horovod = importlib.import_module(f"horovod.{framework}")
    built = {name: bool(getattr(horovod, f"{name}_built")()) for name in ("gloo", "mpi", "nccl")}
    report({"step": "horovod", **built})


def train(framework: str) -> None:
    """Train something tiny as one of two ranks; rank 0 reports the losses and whether the replicas are equal."""
    result = importlib.import_module(f"hvd_async.{framework}.doctor").train()
    if result is not None:
        report(result)


def measure() -> None:
    """Measure the network as one rank; rank 0 reports it."""
    rank, found = importlib.import_module("hvd_async.doctor.network").measure_here()
    if rank == 0:
        report(msgspec.to_builtins(found))


def demo(folder: str, steps: str) -> None:
    """Train under three modes as one of two ranks, without Horovod; rank 0 reports each mode."""
    os.environ["HVD_ASYNC_TRANSPORT"] = "torch"
    for result in importlib.import_module("hvd_async.torch.demo").train(Path(folder), int(steps)):
        if os.environ["RANK"] == "0":
            report(result)


def horovodrun(*arguments: str) -> None:
    """Start ranks by Horovod's launcher, without its checks of transports, which import TensorFlow and take 16 s.

    The doctor has already checked them.
    """
    from horovod.runner import launch

    launch.gloo_built = launch.mpi_built = lambda verbose=False: True
    sys.argv = ["horovodrun", *arguments]
    launch.run_commandline()


if __name__ == "__main__":  # (the launcher imports this module again for each rank that it watches)
    programs = {one.__name__: one for one in (ask, train, measure, demo, horovodrun)}
    programs[sys.argv[1]](*sys.argv[2:])
