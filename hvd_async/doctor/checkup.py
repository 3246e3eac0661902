"""All checks of one machine, in order."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass

from hvd_async.doctor.findings import Finding, note, problem
from hvd_async.doctor.interfaces import free_ports, judge_addresses, judge_ports, read_addresses
from hvd_async.doctor.machine import judge_cores, judge_descriptors, judge_memory, judge_onednn, read_machine
from hvd_async.doctor.processes import Outcome
from hvd_async.doctor.software import (
    FRAMEWORKS,
    ask_all,
    installed,
    judge_answer,
    judge_build,
    judge_data_plane,
    judge_frameworks,
    judge_gpus,
    judge_python,
    read_build,
)
from hvd_async.doctor.trial import judge_trial, run_trial
from hvd_async.runtime.data_plane import TORCH


@dataclass(frozen=True)
class Plan:
    """The job that a check-up is for.

    Attributes:
        local_ranks: ranks on this machine.
        ranks: of the whole job.
        self_test: whether to train on two ranks.
        limit: seconds for each import and for each training.
    """

    local_ranks: int = 2
    ranks: int = 64
    self_test: bool = True
    limit: float = 120.0


def check_machine(plan: Plan) -> list[Finding]:
    """Check this machine; takes as long as the frameworks' imports, and the self-test's trainings.

    Raises:
        EngineError: this Python cannot start itself.
    """
    versions = {name: installed(name) for name in (*FRAMEWORKS, "keras")}
    build = read_build()
    present = [name for name in FRAMEWORKS if versions[name]]
    answers = ask_all(present, plan.limit)
    machine, addresses = read_machine(), read_addresses()
    found = [judge_python(sys.version_info[:3]), *judge_frameworks(versions), *judge_build(build, versions)]
    plane = judge_data_plane(build, os.environ)
    if versions["torch"]:
        found.append(plane)
    for name, outcome in answers.items():
        found += judge_answer(name, outcome, build, plan.limit)
    if build.version and not shutil.which("horovodrun"):
        found.append(
            note("horovodrun", "not on PATH", f"It lies beside this Python: {os.path.dirname(sys.executable)}.")
        )
    built = [transports(outcome) for outcome in answers.values()]
    if not shutil.which("mpirun") and any(each["mpi"] for each in built):
        if all(each["gloo"] for each in built if each["mpi"]):
            found.append(note("mpirun", "not on PATH", "Horovod was built with MPI: launch with horovodrun --gloo."))
        else:
            advice = "Horovod was built with MPI and without Gloo: it starts no ranks until Open MPI is installed."
            found.append(problem("mpirun", "not on PATH", advice))
    found.append(judge_gpus(answers, os.path.exists("/proc/driver/nvidia/version")))
    found += judge_cores(machine, plan.local_ranks, os.environ)
    found += [judge_memory(machine, plan.local_ranks), judge_descriptors(machine, plan.ranks)]
    found += judge_onednn(machine, versions["tensorflow"], os.environ)
    found += [*judge_addresses(addresses, os.environ), *judge_ports(addresses.ordered, free_ports())]
    if plan.self_test:
        on_torch = plane.values.get("plane") == TORCH
        found += [_self_test(name, outcome, on_torch, plan.limit) for name, outcome in answers.items()]
    return found


def transports(outcome: Outcome) -> dict[str, bool]:
    """Return the transports that Horovod has for a framework (``gloo``, ``mpi``, ``nccl``); none if it did not say."""
    told = next((result for result in outcome.results() if result["step"] == "horovod"), {})
    return {name: bool(told.get(name)) for name in ("gloo", "mpi", "nccl")}


def _self_test(framework: str, outcome: Outcome, on_torch: bool, limit: float) -> Finding:
    """Train on two ranks, if anything can connect them.

    Args:
        framework: ``torch`` or ``tensorflow``.
        outcome: of ``ask``.
        on_torch: whether torch's ranks are to be connected by torch.distributed.
        limit: seconds.
    """
    built = transports(outcome)
    imports = any(result["step"] == "framework" for result in outcome.results())
    if framework == "torch" and imports and on_torch:
        transport = "torch"
    elif built["gloo"] or built["mpi"]:
        transport = "gloo" if built["gloo"] else "mpi"
    else:
        return note(f"self-test {framework}", "left out", "Its ranks cannot be connected; see above.")
    return judge_trial(framework, run_trial(framework, transport, limit), limit, transport)
