"""Checks of Python, the frameworks and Horovod: versions, imports, compatibility, and training on two ranks."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import hvd_async
from hvd_async.doctor.findings import NOTE, PROBLEM, Finding, judged, note, ok, problem
from hvd_async.doctor.programs import PROGRAM, Outcome, launch_command, run_job, run_limited
from hvd_async.runtime.data_plane import TORCH, choose

FRAMEWORKS = ("torch", "tensorflow")
OLDEST = {"torch": (2, 3), "tensorflow": (2, 16), "keras": (3,)}
"""Oldest supported versions."""
DISTRIBUTIONS = {"tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-gpu")}
NEWEST_PYTHON = (3, 13)
"""Newest Python that the library was tested with and that TensorFlow has wheels for."""
HOROVOD = "0.28.1"
LIBRARIES = {"torch": "torch/mpi_lib_v2", "tensorflow": "tensorflow/mpi_lib"}
"""Horovod's shared library for each framework, relative to its package."""
KEYS = {"torch": "pytorch", "tensorflow": "tensorflow"}
"""Names of the frameworks in Horovod's ``metadata.json``."""
PATCH = b"HOROVOD_GLOO_OPERATION_TIMEOUT_SECONDS"
"""Marker in shared libraries that ``scripts/install_horovod.sh`` has built, and in no others."""
BUILD = 'bash scripts/install_horovod.sh --python "$(which python)" (docs/install.md)'
TRANSPORTS = {"gloo": "Gloo", "mpi": "MPI", "nccl": "NCCL"}
DRIVER = "/proc/driver/nvidia/version"
RANKS = 2
"""Number of ranks of the self-test."""


# -- what is installed -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Build:
    """Installed Horovod.

    Attributes:
        version: of the distribution; empty if not installed.
        built_for: versions of the frameworks that it was built for, by framework; empty if unknown.
        patched: whether ``scripts/install_horovod.sh`` has built it.
    """

    version: str = ""
    built_for: Mapping[str, str] = field(default_factory=dict)
    patched: bool = False


@dataclass(frozen=True)
class Answer:
    """Report of the program that imports a framework and Horovod's module for it.

    Attributes:
        gpus: number of GPUs that the framework sees; None: it does not import.
        transports: ``gloo``, ``mpi``, ``nccl``: whether Horovod has them; None: Horovod's module does not import.
        ending: human-readable text of how the program ended.
    """

    gpus: int | None
    transports: Mapping[str, bool] | None
    ending: str

    @classmethod
    def of(cls, outcome: Outcome, limit: float) -> Answer:
        """Return the report in a program's output; ``limit``: its time limit, s."""
        steps = {result.pop("step"): result for result in outcome.results()}
        return cls(steps.get("framework", {}).get("gpus"), steps.get("horovod"), outcome.ending(limit))

    def has(self, transport: str) -> bool:
        """Return whether Horovod has a transport for the framework."""
        return bool(self.transports and self.transports[transport])


@dataclass(frozen=True)
class Software:
    """Software of this environment.

    Attributes:
        versions: of torch, tensorflow and keras; empty if not installed.
        build: the installed Horovod.
        answers: reports by installed framework.
    """

    versions: Mapping[str, str]
    build: Build
    answers: Mapping[str, Answer]


def installed(name: str) -> str:
    """Return the installed version of ``torch``, ``tensorflow``, ``keras`` or another package; else empty."""
    for distribution in DISTRIBUTIONS.get(name, (name,)):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def read_build() -> Build:
    """Return the installed Horovod, without importing it."""
    version = installed("horovod")
    if not version:
        return Build()
    folder = Path(str(importlib.metadata.distribution("horovod").locate_file("horovod")))
    metadata = folder / "metadata.json"
    versions = json.loads(metadata.read_text(encoding="utf-8")) if metadata.is_file() else {}
    suffix = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
    libraries = {name: folder / f"{path}{suffix}" for name, path in LIBRARIES.items()}
    built = {name: path for name, path in libraries.items() if path.is_file()}
    patched = bool(built) and all(PATCH in path.read_bytes() for path in built.values())
    return Build(version, {name: versions.get(KEYS[name], "") for name in built}, patched)


def ask(framework: str, limit: float) -> Answer:
    """Import a framework and Horovod's module for it in a separate process."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    return Answer.of(run_limited([sys.executable, "-m", PROGRAM, "ask", framework], limit, environment), limit)


def read_software(limit: float) -> Software:
    """Return the software of this environment; ``limit``: seconds for each import."""
    versions = {name: installed(name) for name in OLDEST}
    present = [name for name in FRAMEWORKS if versions[name]]
    with ThreadPoolExecutor(len(FRAMEWORKS)) as pool:
        answers = dict(zip(present, pool.map(lambda name: ask(name, limit), present), strict=True))
    return Software(versions, read_build(), answers)


# -- judgements --------------------------------------------------------------------------------------------------------


def check_software(found: Software) -> Iterator[Finding]:
    """Judge the software of this environment."""
    yield judge_python(sys.version_info[:3])
    yield from judge_frameworks(found.versions)
    yield from judge_build(found.build, found.versions)
    if found.versions["torch"]:
        yield judge_data_plane(found.build, os.environ, found.answers["torch"].gpus or 0)
    for name, answer in found.answers.items():
        yield from judge_answer(name, answer, found.build)
    if found.build.version and not shutil.which("horovodrun"):
        yield note("horovodrun", "not on PATH", f"It is next to this Python: {os.path.dirname(sys.executable)}.")
    if not shutil.which("mpirun"):
        with_mpi = [answer for answer in found.answers.values() if answer.has("mpi")]
        if not all(answer.has("gloo") for answer in with_mpi):
            advice = "Horovod was built with MPI and without Gloo: it starts no ranks until Open MPI is installed."
            yield problem("mpirun", "not on PATH", advice)
        elif with_mpi:
            yield note("mpirun", "not on PATH", "Horovod was built with MPI: launch with horovodrun --gloo.")
    yield judge_gpus({name: answer.gpus for name, answer in found.answers.items()}, os.path.exists(DRIVER))


def judge_python(version: tuple[int, ...]) -> Finding:
    """Judge the interpreter's version, such as (3, 11, 4)."""
    text = ".".join(map(str, version))
    return judged(
        "python",
        f"Python {text}, hvd_async {hvd_async.__version__}",
        (version[:2] > NEWEST_PYTHON, NOTE, "Not tested with this Python: use 3.10 to 3.13."),
        (version[:2] < (3, 10), PROBLEM, "Use Python 3.10 to 3.13."),
        version=text,
    )


def judge_frameworks(versions: Mapping[str, str]) -> Iterator[Finding]:
    """Judge the installed versions of torch, tensorflow and keras."""
    if not any(versions[name] for name in FRAMEWORKS):
        yield problem("frameworks", "neither torch nor tensorflow is installed", "Install one: pip install torch.")
        return
    for name, least in OLDEST.items():
        version, oldest = versions[name], ".".join(map(str, least))
        if version:
            is_old = tuple(map(int, re.findall(r"\d+", version)[:2])) < least
            advice = f"Use {oldest} or newer: pip install '{name}>={oldest}', then rebuild Horovod: {BUILD}."
            yield judged(name, version, (is_old, PROBLEM, advice, f"{version}, too old"), version=version)
        elif name == "keras" and versions["tensorflow"]:
            yield problem("keras", "not installed", "pip install 'keras>=3'", version="")


def judge_build(build: Build, versions: Mapping[str, str]) -> Iterator[Finding]:
    """Judge Horovod's files against the installed versions of the frameworks."""
    if not build.version:
        for_torch = f"torch trains without it, under torchrun. For horovodrun, elastic jobs and MPI: {BUILD}."
        advice = f"Build it for your frameworks: {BUILD}. (pip install horovod fails with current frameworks.)"
        only_torch = versions["torch"] and not versions["tensorflow"]
        yield judged("horovod", "not installed", (only_torch, NOTE, for_torch), (True, PROBLEM, advice), version="")
        return
    wanted = [name for name in FRAMEWORKS if versions[name]]
    missing = [name for name in wanted if name not in build.built_for]
    words = [f"{name} {version}".strip() for name, version in build.built_for.items()]
    of_these = f"Not built for {' and '.join(missing)}"
    yield judged(
        "horovod",
        f"{build.version}, built for {' and '.join(words) or 'no framework'}",
        (missing and missing == wanted, PROBLEM, f"{of_these}: {BUILD}."),
        (missing, NOTE, f"{of_these}, which is installed: if you want it, {BUILD}."),
        (build.version != HOROVOD, NOTE, f"Tested with {HOROVOD} only: {BUILD}."),
        version=build.version,
        built_for=dict(build.built_for),
        patched=build.patched,
    )
    for name, version in build.built_for.items():
        if version and versions[name] and version != versions[name]:
            fact = f"Horovod was built for {name} {version}, and {versions[name]} is installed"
            advice = f"Rebuild it, or go back to {name} {version}: {BUILD}."
            yield problem("horovod build", fact, advice, built_for=version, installed=versions[name])
    if build.built_for and not build.patched:
        advice = (
            "Training works; without its changes ranks that exchange messages take turns, and lost hosts "
            f"of elastic jobs are waited for (docs/install.md). For these: {BUILD}."
        )
        yield note("horovod changes", "not built by scripts/install_horovod.sh", advice, patched=False)


def judge_data_plane(build: Build, environment: Mapping[str, str], gpus: int) -> Finding:
    """Judge the transport of tensors between torch's ranks under some environment variables.

    Args:
        build: installed Horovod.
        environment: variables by name.
        gpus: number of GPUs that torch sees.
    """
    try:
        plane = choose(environment, "torch" in build.built_for, gpus > 0)
    except (ImportError, ValueError) as error:
        return problem("data plane", "none for torch", f"{error}")
    carrier = {"horovod": "Horovod", "torch": "torch.distributed"}[plane.name]
    under = choose({**environment, "TORCHELASTIC_RUN_ID": "any"}, "torch" in build.built_for)
    also = "" if under.name == plane.name else "; under torchrun torch.distributed"
    return ok("data plane", f"{carrier} for torch, as {plane.reason}{also}", plane=plane.name, reason=plane.reason)


def judge_answer(framework: str, answer: Answer, build: Build) -> Iterator[Finding]:
    """Judge the imports of a framework and of Horovod's module for it."""
    if answer.gpus is None:
        advice = f"See what this says: python -c 'import {framework}'. Reinstall {framework}."
        yield problem(f"import {framework}", answer.ending, advice)
        return
    if framework not in build.built_for:
        return  # (judge_build has reported it)
    name, built = f"horovod.{framework}", answer.transports
    if built is None:
        advice = f"It does not import: most likely it was built for another {framework}. Rebuild it: {BUILD}."
        yield problem(name, answer.ending, advice)
        return
    words = ", ".join(TRANSPORTS[key] for key, there in built.items() if there) or "no transport"
    advices = []
    if not built["gloo"]:
        advices.append(f"Without Gloo launch with mpirun or horovodrun --mpi; elastic jobs need Gloo: {BUILD}.")
    if answer.gpus and not built["nccl"]:
        advices.append(
            f"Tensors on GPUs go by way of the CPU. With a CUDA toolkit and NCCL's header (docs/gpu.md): {BUILD}."
        )
    yield judged(
        name,
        f"imports; built with {words}",
        (not (built["gloo"] or built["mpi"]), PROBLEM, f"It can connect no ranks: {BUILD}."),
        (advices, NOTE, " ".join(advices)),
        **built,
    )


def judge_gpus(gpus: Mapping[str, int | None], driver: bool) -> Finding:
    """Judge how many GPUs each framework sees; ``driver``: whether NVIDIA's driver is installed."""
    seen = {name: count for name, count in gpus.items() if count is not None}
    if not driver and not any(seen.values()):
        return ok("gpus", "none", **seen)
    words = ", ".join(f"{name} sees {count}" for name, count in seen.items()) or "a driver is here"
    blind = [name for name, count in seen.items() if not count]
    advice = f"A GPU driver is here, and {' and '.join(blind)} cannot use it: install the build for CUDA."
    return judged("gpus", words, (blind, NOTE, advice), **seen)


# -- the self-test -----------------------------------------------------------------------------------------------------


def self_test(found: Software, limit: float) -> Iterator[Finding]:
    """Train on two ranks with each framework, if a transport can connect them; ``limit``: seconds per training."""
    for framework, answer in found.answers.items():
        transport = transport_of(framework, answer, found.build)
        if transport:
            command = launch_command(transport, RANKS, ["train", framework])
            yield judge_training(framework, run_job(command, limit), limit, transport)
        else:
            yield note(f"self-test {framework}", "left out", "Its ranks cannot be connected; see above.")


def transport_of(framework: str, answer: Answer, build: Build) -> str:
    """Return the transport of a framework's ranks: ``torch`` (torch.distributed), ``gloo`` or ``mpi``; or nothing."""
    if framework == "torch" and answer.gpus is not None:
        plane = judge_data_plane(build, os.environ, answer.gpus)
        if plane.values.get("plane") == TORCH:
            return TORCH
    return next((transport for transport in ("gloo", "mpi") if answer.has(transport)), "")


def judge_training(framework: str, outcome: Outcome, limit: float, transport: str) -> Finding:
    """Judge the training of a framework's two ranks, which had ``limit`` seconds."""
    name, results = f"self-test {framework}", outcome.results()
    if outcome.returncode != 0 or not results:
        missing = "" if outcome.returncode else ", and no result"
        advice = f"Run it to see its output: {shlex.join(launch_command(transport, RANKS, ['train', framework]))}"
        return problem(name, f"{outcome.ending(limit)}{missing}", advice, output=outcome.output[-4000:])
    result = results[-1]
    better = result["loss_after"] < result["loss_before"]
    return judged(
        name,
        f"{RANKS} ranks, {result['rounds']} rounds, replicas bit-identical, {outcome.seconds:.0f} s",
        (
            result["distance"] != 0.0,
            PROBLEM,
            "The averages do not arrive as they were sent: please report this with the output of --json.",
            f"replicas differ by {result['distance']:g} after drain()",
        ),
        (
            not better,
            PROBLEM,
            "Training does not learn: please report this with the output of --json.",
            f"the loss went from {result['loss_before']:.3g} to {result['loss_after']:.3g}",
        ),
        **result,
        duration_s=outcome.seconds,
        transport=transport,
    )
