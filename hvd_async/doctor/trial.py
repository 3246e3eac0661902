"""The self-test: two ranks of each framework train something tiny under EagerOptimizer.

A rank of it is ``python -m hvd_async.doctor.trial torch``.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping

from hvd_async.doctor.findings import Finding, ok, problem
from hvd_async.doctor.processes import Outcome, run_limited, tell

RANKS = 2
PROGRAM = "hvd_async.doctor.trial"
"""This module."""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS))
"""``torchrun`` as an interpreter's arguments."""


def launcher() -> list[str]:
    """Return Horovod's ``horovodrun``, as this interpreter runs it, whatever PATH is."""
    return [sys.executable, "-m", "hvd_async.doctor.launch"]


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what a job on the CPUs of this machine has for its environment, given this process's."""
    kept = {name: value for name, value in environ.items() if not name.startswith(("HOROVOD_RANK", "HOROVOD_SIZE"))}
    return {
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


def run_trial(framework: str, transport: str, limit: float) -> Outcome:
    """Train on two ranks of this machine.

    Args:
        framework: ``torch`` or ``tensorflow``.
        transport: ``gloo`` or ``mpi``, of Horovod; ``torch``: torch.distributed, under ``torchrun``.
        limit: seconds.
    """
    if transport == "torch":
        command = [sys.executable, *TORCHRUN, "-m", PROGRAM, framework]
        return run_limited(command, limit, environment(os.environ))
    command = [*launcher(), "-np", str(RANKS), f"--{transport}"]
    if transport == "mpi":
        command.append("--mpi-args=--oversubscribe")
    return run_limited([*command, sys.executable, "-m", PROGRAM, framework], limit, environment(os.environ))


def judge_trial(framework: str, outcome: Outcome, limit: float, transport: str = "gloo") -> Finding:
    """Judge the training of a framework's two ranks.

    Args:
        framework: ``torch`` or ``tensorflow``.
        outcome: of ``run_trial``.
        limit: seconds that it had.
        transport: as of ``run_trial``.
    """
    name = f"self-test {framework}"
    results = outcome.results()
    if outcome.returncode != 0 or not results:
        missing = "" if outcome.returncode else ", and no result"
        start = f"horovodrun -np {RANKS} --{transport} python"
        if transport == "torch":
            start = " ".join(["python", *TORCHRUN])
        advice = f"Run it to see all: {start} -m {PROGRAM} {framework}"
        return problem(name, f"{outcome.ending(limit)}{missing}", advice, output=outcome.output[-4000:])
    result = results[-1]
    values = {**result, "duration_s": outcome.seconds, "transport": transport}
    if result["distance"] != 0.0:
        advice = "The averages do not arrive as they were sent: please report this with the output of --json."
        return problem(name, f"replicas differ by {result['distance']:g} after drain()", advice, **values)
    if not result["loss_after"] < result["loss_before"]:
        fact = f"the loss went from {result['loss_before']:.3g} to {result['loss_after']:.3g}"
        return problem(name, fact, "Training does not learn: please report this with the output of --json.", **values)
    fact = f"{RANKS} ranks, {result['rounds']} rounds, replicas bit-identical, {outcome.seconds:.0f} s"
    return ok(name, fact, **values)


def main(framework: str) -> None:
    """Train as one rank; rank 0 tells what came of it."""
    result = importlib.import_module(f"hvd_async.{framework}.doctor").train()
    if result is not None:
        tell(result)


if __name__ == "__main__":
    main(sys.argv[1])
