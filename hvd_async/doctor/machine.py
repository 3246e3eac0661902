"""Checks of this machine: cores, memory, open files, processor, addresses and ports."""

from __future__ import annotations

import math
import os
import platform
import resource
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from hvd_async.doctor.findings import NOTE, PROBLEM, Finding, judged, note, problem
from hvd_async.errors import EngineError
from hvd_async.runtime.addresses import own_addresses, reachable
from hvd_async.runtime.descriptors import needed_for

GIB = 2**30
ENOUGH = 2 * GIB
"""Bytes of memory per rank below which the framework may leave too little for a real model."""
LEAST = GIB // 2
"""Bytes of memory per rank that a framework needs for itself."""
FEW_PORTS = 2000
ROOT, CGROUP = Path("/"), "sys/fs/cgroup"
PORT_LIMIT = 3.0
"""Seconds in which a port of this machine must accept a connection from it."""


# -- facts -------------------------------------------------------------------------------------------------------------


def usable_cores(root: Path = ROOT) -> float:
    """Return the cores that this process, or its container, may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _read(root / CGROUP / "cpu.max").split()
    return cores if len(quota) != 2 or quota[0] == "max" else min(cores, int(quota[0]) / int(quota[1]))


def free_memory(root: Path = ROOT) -> int:
    """Return the bytes of memory that this process, or its container, may still use."""
    available = int(psutil.virtual_memory().available)
    most, used, stat = (_read(root / CGROUP / f"memory.{name}").split() for name in ("max", "current", "stat"))
    if not most or not used or most[0] == "max":
        return available
    cached = int(dict(zip(stat[::2], stat[1::2], strict=False)).get("inactive_file", "0"))  # (freed on demand)
    return min(available, max(0, int(most[0]) - max(0, int(used[0]) - cached)))


def processor_flags(root: Path = ROOT) -> set[str]:
    """Return the instruction sets of an x86 processor, by Linux' names; empty for other processors."""
    lines = _read(root / "proc/cpuinfo").splitlines() if platform.machine() in ("x86_64", "AMD64") else []
    return set(next((line for line in lines if line.startswith("flags")), "").partition(":")[2].split())


def free_ports(root: Path = ROOT) -> int | None:
    """Return the number of ports that the kernel chooses from; None if unknown."""
    ends = _read(root / "proc/sys/net/ipv4/ip_local_port_range").split()
    return int(ends[1]) - int(ends[0]) + 1 if len(ends) == 2 else None


def interface_addresses() -> dict[str, list[str]]:
    """Return the addresses of each interface with an address."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [one.address.partition("%")[0] for one in found if one.family in families]
        for name, found in psutil.net_if_addrs().items()
        if any(one.family in families for one in found)
    }


def host_address(name: str) -> str:
    """Return the address of a host's name; empty if it has none."""
    try:
        return socket.gethostbyname(name)
    except OSError:
        return ""


def _read(path: Path) -> str:
    """Return a file's text; empty if the file does not exist: on other systems, or without cgroup version 2."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


# -- judgements --------------------------------------------------------------------------------------------------------


def check_machine(local_ranks: int, ranks: int, has_tensorflow: bool) -> Iterator[Finding]:
    """Judge this machine for a job of ``ranks`` ranks, ``local_ranks`` of them here."""
    yield from judge_cores(usable_cores(), local_ranks, os.environ)
    yield judge_memory(free_memory(), local_ranks)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield judge_descriptors(soft, hard, ranks)
    if has_tensorflow:
        yield from judge_onednn(processor_flags(), os.environ)
    name = socket.gethostname()
    yield from judge_addresses(interface_addresses(), name, host_address(name), os.environ)
    yield judge_ports(own_addresses(), free_ports())


def judge_cores(cores: float, local_ranks: int, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Judge cores and OMP_NUM_THREADS for ``local_ranks`` ranks on this machine."""
    each = cores / local_ranks
    shared = "Ranks share cores: start fewer here, use Gloo rather than MPI, and set HOROVOD_CYCLE_TIME=5."
    fact = f"{cores:g} for {local_ranks} ranks: {each:.2g} a rank"
    yield judged("cores", fact, (each < 1, NOTE, shared), cores=cores, per_rank=each)
    wanted, text = max(1, int(each)), environ.get("OMP_NUM_THREADS", "")
    first = text.partition(",")[0].strip()
    threads = int(first) if first.isdecimal() else 0
    if not text:
        advice = f"Each rank's torch starts a thread per core: set OMP_NUM_THREADS={wanted}."
        yield judged("OMP_NUM_THREADS", "not set, one rank", (local_ranks > 1, NOTE, advice, "not set"))
    elif threads < 1:
        advice = f"It must be a number of threads: set OMP_NUM_THREADS={wanted}, or unset it."
        yield problem("OMP_NUM_THREADS", repr(text), advice)
    else:
        fact, many = (
            f"{threads}; {threads * local_ranks} threads in all",
            threads * local_ranks > max(cores, local_ranks),
        )
        advice = f"More threads than cores: set OMP_NUM_THREADS={wanted}."
        yield judged("OMP_NUM_THREADS", fact, (many, NOTE, advice), threads=threads)


def judge_memory(available: int, local_ranks: int) -> Finding:
    """Judge the free memory, bytes, for ``local_ranks`` ranks on this machine."""
    each = available // local_ranks
    return judged(
        "memory",
        f"{available / GIB:.1f} GiB free: {each / GIB:.1f} GiB a rank",
        (each < LEAST, PROBLEM, "Too little for the framework itself: start fewer ranks here."),
        (each < ENOUGH, NOTE, "Enough for small models only: check that yours fits."),
        available_bytes=available,
        per_rank_bytes=each,
    )


def judge_descriptors(soft: int, hard: int, ranks: int) -> Finding:
    """Judge the limits on open files, with rank 0 of ``ranks`` ranks on this machine."""
    needed = needed_for(ranks)
    most_soft, most_hard = (math.inf if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard))
    raised = f"Raise the hard limit: ulimit -Hn {needed}, or LimitNOFILE= of what starts jobs (docs/clusters.md)."
    own = f"This library raises it itself; Gloo, which connects all ranks, does not: ulimit -n {needed}."
    words = "no limit" if most_soft == math.inf else f"{soft} open files"
    return judged(
        "open files",
        f"{words}; rank 0 of {ranks} ranks needs {needed}",
        (most_hard < needed, PROBLEM, raised),
        (most_soft < needed, NOTE, own),
        soft=None if most_soft == math.inf else soft,
        hard=None if most_hard == math.inf else hard,
        needed=needed,
    )


def judge_onednn(flags: set[str], environ: Mapping[str, str]) -> Iterator[Finding]:
    """Judge whether TensorFlow will use oneDNN on an x86 processor: by default it does with AVX-512 or AMX only."""
    if not flags:
        return
    quick = any(flag.startswith(("avx512", "amx")) for flag in flags)
    chosen = environ.get("TF_ENABLE_ONEDNN_OPTS", "")
    has = "AVX-512" if quick else "AVX2" if "avx2" in flags else "no AVX2"
    off = "This makes convolutions on the CPU several times slower: unset TF_ENABLE_ONEDNN_OPTS, or set it to 1."
    unset = "TensorFlow leaves oneDNN off here, which is several times slower: set TF_ENABLE_ONEDNN_OPTS=1."
    yield judged(
        "oneDNN",
        f"{has}; on",
        (chosen == "0", NOTE, off, f"{has}; switched off"),
        (not quick and not chosen, NOTE, unset, f"{has}; off"),
        avx512=quick,
        TF_ENABLE_ONEDNN_OPTS=chosen,
    )


def is_loopback(address: str) -> bool:
    """Return whether an address is valid on its own machine only."""
    return address.startswith("127.") or address == "::1"


def judge_addresses(
    found: Mapping[str, Sequence[str]], name: str, named: str, environ: Mapping[str, str]
) -> Iterator[Finding]:
    """Judge this machine's addresses.

    Args:
        found: addresses of each interface.
        name: of the host.
        named: address of that name; empty if it has none.
        environ: environment variables, some of which choose an address.
    """
    outward = {key: addresses for key, addresses in found.items() if not all(map(is_loopback, addresses))}
    yield judged(
        "interfaces",
        "; ".join(f"{key} {', '.join(each)}" for key, each in outward.items()),
        (not outward, NOTE, "Jobs on this machine alone will work.", "loopback only"),
        interfaces={key: list(addresses) for key, addresses in found.items()},
    )
    chosen, address = environ.get("HOROVOD_GLOO_IFACE", ""), environ.get("HVD_ASYNC_ADDRESS", "")
    if chosen and chosen not in found:
        advice = f"Name one of {', '.join(found)}, or unset it."
        yield problem("HOROVOD_GLOO_IFACE", f"there is no interface {chosen!r} with an address", advice)
    if address and address not in {name, "localhost"}.union(*found.values()):
        advice = "Right only on other hosts than rank 0's, or behind a NAT: on rank 0's host set it to one of its own."
        yield note("HVD_ASYNC_ADDRESS", f"{address} is not an address of this machine", advice)
    unknown = "Gloo looks it up for process sets: add it to /etc/hosts, or set HOROVOD_GLOO_IFACE."
    local = (
        f"For jobs on several hosts name the interface, HOROVOD_GLOO_IFACE={next(iter(outward), '')}, or correct "
        "/etc/hosts (docs/clusters.md)."
    )
    yield judged(
        "host name",
        f"{name} is {named}",
        (not named, NOTE, unknown, f"{name} has no address"),
        (is_loopback(named) and outward, NOTE, local, f"{name} is {named}, good on this machine only"),
        name=name,
        address=named,
    )


def judge_ports(addresses: Sequence[str], ports: int | None) -> Finding:
    """Judge whether ranks of this machine can connect to each other.

    Args:
        addresses: of this machine, best guess first; the first and loopback are tried.
        ports: number that the kernel chooses from; None: unknown.
    """
    tried = list(dict.fromkeys([*addresses[:1], "127.0.0.1"]))
    refused = [address for address in tried if not _connects(address)]
    if refused:
        advice = "Ranks cannot meet: look for a firewall, or a sandbox without a network (docs/clusters.md)."
        return problem("ports", f"no connection to {' and '.join(refused)}", advice, refused=refused)
    fact = f"connections to {' and '.join(tried)}; {'unknown number of' if ports is None else ports} ports"
    advice = "Few: widen net.ipv4.ip_local_port_range for large jobs."
    return judged("ports", fact, (ports is not None and ports < FEW_PORTS, NOTE, advice), ports=ports)


def _connects(address: str) -> bool:
    """Return whether a port of this machine accepts a connection at one of its addresses."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.create_server((address, 0), family=family) as server:
            reachable([address], server.getsockname()[1], PORT_LIMIT, "this machine")
    except (OSError, EngineError):
        return False
    return True
