"""Cores, memory, descriptors, instructions and threads of this machine."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from hvd_async.doctor.findings import Finding, note, ok, problem
from hvd_async.runtime.descriptors import needed_for, shortage

GIB = 2**30
ENOUGH = 2 * GIB
"""Bytes of memory a rank below which a real model may not fit beside the framework."""
LEAST = GIB // 2
"""Bytes of memory a rank that a framework takes by itself."""
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Machine:
    """Facts of a machine.

    Attributes:
        cores: that this process may use.
        quota: cores' worth of time that a container may use; None: no limit.
        available: bytes of memory that can be had now.
        flags: of the processor, as Linux names them; empty if unknown.
        architecture: such as "x86_64".
        soft, hard: limits on open files; None: none.
    """

    cores: int
    quota: float | None
    available: int
    flags: frozenset[str]
    architecture: str
    soft: int | None
    hard: int | None


def read_machine(cgroup: Path = CGROUP, cpuinfo: Path = Path("/proc/cpuinfo")) -> Machine:
    """Return the facts of this machine."""
    soft, hard = (
        None if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    left = _memory_left(cgroup)
    available = int(psutil.virtual_memory().available)
    return Machine(
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        quota=_quota(cgroup),
        available=available if left is None else min(available, left),
        flags=_flags(cpuinfo),
        architecture=platform.machine(),
        soft=soft,
        hard=hard,
    )


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split()
    except OSError:  # (no cgroup of version 2)
        return []


def _quota(cgroup: Path) -> float | None:
    words = _words(cgroup / "cpu.max")
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0] != "max" else None


def _memory_left(cgroup: Path) -> int | None:
    most, used = _words(cgroup / "memory.max"), _words(cgroup / "memory.current")
    if not most or not used or most[0] == "max":
        return None
    told = _words(cgroup / "memory.stat")
    cached = dict(zip(told[::2], told[1::2], strict=False)).get(
        "inactive_file", "0"
    )  # files, given back when asked for
    return max(0, int(most[0]) - max(0, int(used[0]) - int(cached)))


def _flags(cpuinfo: Path) -> frozenset[str]:
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:  # (not Linux)
        return frozenset()
    return next((frozenset(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), frozenset())


def judge_cores(machine: Machine, local_ranks: int, environ: Mapping[str, str]) -> list[Finding]:
    """Judge cores and OMP_NUM_THREADS for ``local_ranks`` ranks on this machine."""
    cores = machine.cores if machine.quota is None else min(float(machine.cores), machine.quota)
    each = cores / local_ranks
    fact = f"{cores:g} for {local_ranks} ranks: {each:.2g} a rank"
    if each < 1:
        advice = "Ranks share cores: start fewer here, take Gloo and not MPI, HOROVOD_CYCLE_TIME=5."
        found = [note("cores", fact, advice, cores=cores, per_rank=each)]
    else:
        found = [ok("cores", fact, cores=cores, per_rank=each)]
    wanted, text = max(1, int(each)), environ.get("OMP_NUM_THREADS", "")
    if not text:
        if local_ranks > 1:
            advice = f"Each rank's torch starts a thread a core: set OMP_NUM_THREADS={wanted}."
            return [*found, note("OMP_NUM_THREADS", "not set", advice)]
        return [*found, ok("OMP_NUM_THREADS", "not set, one rank")]
    first = text.partition(",")[0].strip()
    if not first.isdecimal() or int(first) < 1:
        advice = f"It is no number of threads: set OMP_NUM_THREADS={wanted}, or unset it."
        return [*found, problem("OMP_NUM_THREADS", repr(text), advice)]
    threads = int(first)
    fact = f"{threads}; {threads * local_ranks} threads in all"
    if threads * local_ranks > max(cores, local_ranks):
        advice = f"More threads than cores: set OMP_NUM_THREADS={wanted}."
        return [*found, note("OMP_NUM_THREADS", fact, advice, threads=threads)]
    return [*found, ok("OMP_NUM_THREADS", fact, threads=threads)]


def judge_memory(machine: Machine, local_ranks: int) -> Finding:
    """Judge the memory for ``local_ranks`` ranks on this machine."""
    each = machine.available // local_ranks
    fact = f"{machine.available / GIB:.1f} GiB free: {each / GIB:.1f} GiB a rank"
    values = {"available_bytes": machine.available, "per_rank_bytes": each}
    if each < LEAST:
        return problem("memory", fact, "Too little for the framework itself: start fewer ranks here.", **values)
    if each < ENOUGH:
        return note("memory", fact, "Enough for small models only: see that yours fits.", **values)
    return ok("memory", fact, **values)


def judge_descriptors(machine: Machine, ranks: int) -> Finding:
    """Judge the limit on open files, for this machine as rank 0's of a job of ``ranks`` ranks."""
    needed = needed_for(ranks)
    limit = "no limit" if machine.soft is None else f"{machine.soft} open files"
    fact = f"{limit}; rank 0 of {ranks} ranks needs {needed}"
    values = {"soft": machine.soft, "hard": machine.hard, "needed": needed}
    if shortage(ranks, here=False) or (machine.hard is not None and machine.hard < needed):
        advice = f"Raise the hard limit: ulimit -Hn {needed}, or LimitNOFILE= of what starts jobs (docs/clusters.md)."
        return problem("open files", fact, advice, **values)
    if machine.soft is not None and machine.soft < needed:
        advice = f"This library raises it for itself; Gloo, which connects all ranks, does not: ulimit -n {needed}."
        return note("open files", fact, advice, **values)
    return ok("open files", fact, **values)


def judge_onednn(machine: Machine, tensorflow: str, environ: Mapping[str, str]) -> list[Finding]:
    """Judge whether TensorFlow will use oneDNN, if it is installed (``tensorflow``: its version) on an x86 processor.

    TensorFlow has it on by itself only on processors with AVX-512 or AMX.
    """
    if not tensorflow or machine.architecture not in ("x86_64", "AMD64") or not machine.flags:
        return []
    quick = any(flag.startswith(("avx512", "amx")) for flag in machine.flags)
    chosen = environ.get("TF_ENABLE_ONEDNN_OPTS", "")
    has = "AVX-512" if quick else "AVX2" if "avx2" in machine.flags else "no AVX2"
    values = {"avx512": quick, "TF_ENABLE_ONEDNN_OPTS": chosen}
    if chosen == "0":
        advice = "Convolutions on the CPU are several times slower so: unset TF_ENABLE_ONEDNN_OPTS, or set it to 1."
        return [note("oneDNN", f"{has}; switched off", advice, **values)]
    if not quick and not chosen:
        advice = "TensorFlow leaves oneDNN off here, which is several times slower: set TF_ENABLE_ONEDNN_OPTS=1."
        return [note("oneDNN", f"{has}; off", advice, **values)]
    return [ok("oneDNN", f"{has}; on", **values)]
