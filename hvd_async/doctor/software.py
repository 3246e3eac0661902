"""Python, the frameworks, and Horovod: what is installed, whether it imports, and whether the build matches."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import sys
import sysconfig
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hvd_async
from hvd_async.doctor.findings import Finding, note, ok, problem
from hvd_async.doctor.processes import Outcome, run_limited
from hvd_async.runtime.data_plane import choose

FRAMEWORKS = ("torch", "tensorflow")
OLDEST = {"torch": (2, 3), "tensorflow": (2, 16), "keras": (3,)}
"""Versions from which on the library works."""
DISTRIBUTIONS = {"tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-gpu")}
NEWEST_PYTHON = (3, 13)
"""With which the library was tried, and for which TensorFlow has wheels."""
HOROVOD = "0.28.1"
LIBRARIES = {"torch": "torch/mpi_lib_v2", "tensorflow": "tensorflow/mpi_lib"}
"""Horovod's shared library for each framework, below its package."""
KEYS = {"torch": "pytorch", "tensorflow": "tensorflow"}
"""Frameworks as Horovod's ``metadata.json`` calls them."""
PATCH = b"HOROVOD_GLOO_OPERATION_TIMEOUT_SECONDS"
"""In a shared library that ``scripts/install_horovod.sh`` has built, and in no other."""
BUILD = 'bash scripts/install_horovod.sh --python "$(which python)" (docs/install.md)'


@dataclass(frozen=True)
class Build:
    """A Horovod as it lies on the disk.

    Attributes:
        version: of the distribution; empty: none is installed.
        built_for: for each framework that it was built with, that framework's version then; empty if unknown.
        patched: whether ``scripts/install_horovod.sh`` has built it.
    """

    version: str = ""
    built_for: Mapping[str, str] = field(default_factory=dict)
    patched: bool = False


def installed(name: str) -> str:
    """Return the installed version of ``torch``, ``tensorflow``, ``keras`` or another package; empty: none is."""
    for distribution in DISTRIBUTIONS.get(name, (name,)):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def read_build() -> Build:
    """Return the Horovod of this environment, without an import of it."""
    version = installed("horovod")
    if not version:
        return Build()
    located = importlib.metadata.distribution("horovod").locate_file("horovod")
    return read_folder(version, Path(str(located)))


def read_folder(version: str, folder: Path) -> Build:
    """Return the Horovod in a package's folder."""
    told: dict[str, str] = {}
    if (folder / "metadata.json").is_file():
        told = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))
    suffix = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
    libraries = {name: folder / f"{path}{suffix}" for name, path in LIBRARIES.items()}
    built = {name: path for name, path in libraries.items() if path.is_file()}
    return Build(
        version,
        {name: told.get(KEYS[name], "") for name in built},
        bool(built) and all(PATCH in path.read_bytes() for path in built.values()),
    )


def ask(framework: str, limit: float) -> Outcome:
    """Import a framework and Horovod's module for it in a process of its own."""
    command = [sys.executable, "-m", "hvd_async.doctor.ask", framework]
    return run_limited(command, limit, {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"})


def ask_all(frameworks: list[str], limit: float) -> dict[str, Outcome]:
    """Ask several frameworks side by side."""
    with ThreadPoolExecutor(max(1, len(frameworks))) as pool:
        return dict(zip(frameworks, pool.map(lambda name: ask(name, limit), frameworks), strict=True))


def numbers(version: str) -> tuple[int, ...]:
    """``"2.13.0+cpu"`` as (2, 13, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def judge_python(version: tuple[int, ...]) -> Finding:
    """Judge the interpreter's version, such as (3, 11, 4)."""
    text = ".".join(map(str, version))
    fact = f"Python {text}, hvd_async {hvd_async.__version__}"
    if version[:2] > NEWEST_PYTHON:
        return note("python", fact, "Not tried with this Python: take 3.10 to 3.13.", version=text)
    if version[:2] < (3, 10):
        return problem("python", fact, "Take Python 3.10 to 3.13.", version=text)
    return ok("python", fact, version=text)


def judge_frameworks(versions: Mapping[str, str]) -> list[Finding]:
    """Judge the installed versions of torch, tensorflow and keras; an empty version: it is not installed."""
    if not any(versions.get(name) for name in FRAMEWORKS):
        return [problem("frameworks", "neither torch nor tensorflow is installed", "Install one: pip install torch.")]
    found = []
    for name in ("torch", "tensorflow", "keras"):
        version, oldest = versions.get(name, ""), ".".join(map(str, OLDEST[name]))
        if not version:
            if name == "keras" and versions.get("tensorflow"):
                found.append(problem("keras", "not installed", "pip install 'keras>=3'", version=""))
        elif numbers(version) < OLDEST[name]:
            advice = f"Take {oldest} or newer: pip install '{name}>={oldest}', then build Horovod anew: {BUILD}."
            found.append(problem(name, f"{version}, too old", advice, version=version))
        else:
            found.append(ok(name, version, version=version))
    return found


def judge_build(build: Build, versions: Mapping[str, str]) -> list[Finding]:
    """Judge Horovod's files against the installed versions of the frameworks."""
    if not build.version:
        advice = f"Build it for your frameworks: {BUILD}. (pip install horovod fails beside today's frameworks.)"
        if versions.get("torch") and not versions.get("tensorflow"):
            advice = f"torch trains without it, under torchrun. For horovodrun, elastic jobs and MPI: {BUILD}."
            return [note("horovod", "not installed", advice, version="")]
        return [problem("horovod", "not installed", advice, version="")]
    wanted = [name for name in FRAMEWORKS if versions.get(name)]
    missing = [name for name in wanted if name not in build.built_for]
    values: dict[str, Any] = {"version": build.version, "built_for": dict(build.built_for), "patched": build.patched}
    words = [f"{name} {version}".strip() for name, version in build.built_for.items()]
    fact = f"{build.version}, built for {' and '.join(words) or 'no framework'}"
    found = []
    if missing and len(missing) == len(wanted):
        found.append(problem("horovod", fact, f"Not built for {' and '.join(missing)}: {BUILD}.", **values))
    elif missing:
        advice = f"Not built for {missing[0]}, which is installed: if you want it, {BUILD}."
        found.append(note("horovod", fact, advice, **values))
    elif build.version != HOROVOD:
        found.append(note("horovod", fact, f"Tried with {HOROVOD} only: {BUILD}.", **values))
    else:
        found.append(ok("horovod", fact, **values))
    for name, version in build.built_for.items():
        if version and versions.get(name) and version != versions[name]:
            fact = f"Horovod was built for {name} {version}, and {versions[name]} is installed"
            advice = f"Build it anew, or go back to {name} {version}: {BUILD}."
            found.append(problem("horovod build", fact, advice, built_for=version, installed=versions[name]))
    if build.built_for and not build.patched:
        fact = "not built by scripts/install_horovod.sh"
        advice = (
            "Training works; without its changes ranks that exchange messages take turns, and lost hosts "
            f"of elastic jobs are waited for (docs/install.md). For these: {BUILD}."
        )
        found.append(note("horovod changes", fact, advice, patched=False))
    return found


def judge_data_plane(build: Build, environment: Mapping[str, str]) -> Finding:
    """Judge what carries the tensors of torch's ranks.

    Args:
        build: Horovod as it lies on the disk.
        environment: variables that decide it.
    """
    try:
        plane = choose(environment, "torch" in build.built_for)
    except (ImportError, ValueError) as error:
        return problem("data plane", "none for torch", f"{error}")
    carrier = {"horovod": "Horovod", "torch": "torch.distributed"}[plane.name]
    under = choose({**environment, "TORCHELASTIC_RUN_ID": "any"}, "torch" in build.built_for)
    also = "" if under.name == plane.name else "; under torchrun torch.distributed"
    return ok("data plane", f"{carrier} for torch, as {plane.reason}{also}", plane=plane.name, reason=plane.reason)


def judge_answer(framework: str, outcome: Outcome, build: Build, limit: float) -> list[Finding]:
    """Judge what became of the import of a framework and of Horovod's module for it.

    Args:
        framework: ``torch`` or ``tensorflow``.
        outcome: of ``ask``.
        build: Horovod as it lies on the disk.
        limit: seconds that the program was given.
    """
    steps = {result["step"]: result for result in outcome.results()}
    if "framework" not in steps:
        advice = f"See what this says: python -c 'import {framework}'. Install {framework} anew."
        return [problem(f"import {framework}", outcome.ending(limit), advice)]
    if framework not in build.built_for:
        return []  # (judge_build has said so)
    name = f"horovod.{framework}"
    if "horovod" not in steps:
        advice = f"It does not import: most likely it was built for another {framework}. Build it anew: {BUILD}."
        return [problem(name, outcome.ending(limit), advice)]
    built = {key: bool(steps["horovod"][key]) for key in ("gloo", "mpi", "nccl")}
    names = {"gloo": "Gloo", "mpi": "MPI", "nccl": "NCCL"}
    fact = "imports; built with " + (", ".join(names[key] for key, there in built.items() if there) or "no transport")
    if not (built["gloo"] or built["mpi"]):
        return [problem(name, fact, f"It can connect no ranks: {BUILD}.", **built)]
    advices = []
    if not built["gloo"]:
        advices.append(f"Without Gloo launch with mpirun or horovodrun --mpi; elastic jobs need Gloo: {BUILD}.")
    if steps["framework"]["gpus"] and not built["nccl"]:
        advices.append(
            f"Tensors on GPUs go by way of the CPU. With a CUDA toolkit and NCCL's header (docs/gpu.md): {BUILD}."
        )
    if advices:
        return [note(name, fact, " ".join(advices), **built)]
    return [ok(name, fact, **built)]


def judge_gpus(answers: Mapping[str, Outcome], driver: bool) -> Finding:
    """Judge how many GPUs the frameworks see.

    Args:
        answers: of ``ask``, by framework.
        driver: whether NVIDIA's driver is here.
    """
    seen = {
        name: int(result["gpus"])
        for name, outcome in answers.items()
        for result in outcome.results()
        if result["step"] == "framework"
    }
    words = ", ".join(f"{name} sees {count}" for name, count in seen.items())
    if not driver and not any(seen.values()):
        return ok("gpus", "none", **seen)
    blind = [name for name, count in seen.items() if not count]
    if blind:
        advice = f"A GPU driver is here, and {' and '.join(blind)} cannot use it: install the build for CUDA."
        return note("gpus", words, advice, **seen)
    return ok("gpus", words or "a driver is here", **seen)
