"""Measures the network of the job that this rank is of, and starts such jobs on hosts that are named."""

from __future__ import annotations

import importlib
import os
import sys

from hvd_async.doctor.collectives import HorovodCollectives
from hvd_async.doctor.findings import Finding, note, ok, problem
from hvd_async.doctor.network import Measurement, measure, pairs_of
from hvd_async.doctor.processes import run_limited, tell
from hvd_async.doctor.software import BUILD, FRAMEWORKS, installed, read_build
from hvd_async.doctor.trial import environment, launcher
from hvd_async.errors import EngineError
from hvd_async.runtime.data_plane import TORCH, choose

SIZES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Variables with the number of ranks: by ``horovodrun``, Open MPI, other MPIs. torchrun's ``WORLD_SIZE`` counts beside
its ``RANK``."""
A_LINK = 10.0
"""Seconds that a link's measurement may take, at the most."""
SLOW = 0.5
"""Share of the links' median bandwidth below which a link is named."""


def in_a_job() -> bool:
    """Whether this process is one of several ranks."""
    sizes = [*SIZES, "WORLD_SIZE"] if "RANK" in os.environ else SIZES
    return any(os.environ.get(name, "1") not in ("", "1") for name in sizes)


def framework_here() -> str:
    """Return the framework whose Horovod has collectives here: torch if there is one, since it imports sooner.

    Raises:
        ValueError: there is no Horovod, or none for a framework.
    """
    built = read_build().built_for
    found = next((name for name in FRAMEWORKS if name in built), "")
    if not found:
        raise ValueError(
            f"no Horovod here that was built for torch or tensorflow: {BUILD}. Without Horovod, on each host: torchrun "
            "--nnodes ... --nproc-per-node 1 -m hvd_async doctor"
        )
    return found


def measure_here() -> tuple[int, Measurement]:
    """Measure as one rank of a job; returns this rank, and what all have found."""
    on_torch = bool(installed("torch")) and choose().name == TORCH
    framework = "torch" if on_torch else framework_here()
    with HorovodCollectives(importlib.import_module(f"hvd_async.{framework}.doctor")) as collectives:
        return collectives.rank(), measure(collectives)


def hosts_of_ranks(hosts: str) -> list[str]:
    """Return the host of each rank of ``h1:1,h2:2``: h1, h2, h2.

    Raises:
        ValueError: it does not read like this.
    """
    ranks: list[str] = []
    for host in hosts.split(","):
        name, _, slots = host.strip().rpartition(":")
        if not name or not slots.isdecimal() or int(slots) < 1:
            raise ValueError(f"--hosts {hosts!r}: {host!r} is not HOST:RANKS, such as node1:1,node2:1")
        ranks += [name] * int(slots)
    return ranks


def measure_hosts(hosts: str, limit: float, more: list[str]) -> Measurement:
    """Start a job on hosts by ``horovodrun``, and return what its ranks have measured.

    Args:
        hosts: as of ``horovodrun -H``.
        limit: seconds for its start; each link has ``A_LINK`` more.
        more: further options of ``horovodrun``.

    Raises:
        ValueError: ``hosts`` does not read like ``h1:1,h2:1``, or there is no Horovod here.
        EngineError: the job failed, or its time ran out.
    """
    ranks = hosts_of_ranks(hosts)
    limit += A_LINK * len(pairs_of(ranks))
    framework_here()
    command = [
        *launcher(),
        "-np",
        str(len(ranks)),
        "-H",
        hosts,
        "--gloo",
        *more,
        sys.executable,
        "-m",
        "hvd_async.doctor.network_job",
    ]
    outcome = run_limited(command, limit, environment(os.environ))
    results = outcome.results()
    if outcome.returncode != 0 or not results:
        said = "\n".join(outcome.output.splitlines()[-20:])
        raise EngineError(f"the job on {hosts} has failed, {outcome.ending(limit)}. The end of its output:\n{said}")
    return Measurement.from_json(results[-1])


def judge_network(found: Measurement) -> list[Finding]:
    """Judge what was measured: hosts that cannot be reached, links slower than the others, versions that differ."""
    unreachable = [link for link in found.links if link.failure]
    results = []
    for link in unreachable:
        advice = (
            "Open all ports between the hosts, or name the address on rank 0's host: HVD_ASYNC_ADDRESS, or "
            "HOROVOD_GLOO_IFACE (docs/clusters.md)."
        )
        results.append(problem("connections", f"{link.sender} to {link.receiver}: {link.failure}", advice))
    if not unreachable:
        results.append(ok("connections", f"all of {len(found.links)} that were tried"))
    rates = sorted(link.bandwidth_bytes_s for link in found.links)
    slow = [link for link in found.links if link.bandwidth_bytes_s < SLOW * rates[len(rates) // 2]]
    for link in slow:
        fact = f"{link.sender} to {link.receiver}: {megabits(link.bandwidth_bytes_s)} Mbit/s, less than half of others"
        results.append(note("bandwidth", fact, "An allreduce is as slow as its slowest link: see to this one."))
    if not slow:
        results.append(ok("bandwidth", f"at least {megabits(rates[0])} Mbit/s"))
    if len(set(found.versions.values())) > 1:
        fact = "; ".join(f"{host}: {version}" for host, version in found.versions.items())
        results.append(problem("versions", fact, "Install the same on all hosts.", **found.versions))
    else:
        results.append(ok("versions", next(iter(found.versions.values()))))
    if len(found.hosts) == 1:
        advice = "This is the memory's speed and not a network's: name several hosts (--hosts h1:1,h2:1)."
        results.append(note("hosts", "one", advice))
    elif max(found.hosts.values()) > 1:
        advice = "Of each host the first rank was measured; in the allreduce a host's ranks share its link."
        results.append(note("hosts", f"{len(found.hosts)}, with {found.ranks} ranks", advice))
    return results


def megabits(bytes_s: float) -> str:
    """Bytes/s as Mbit/s, in words."""
    return f"{8e-6 * bytes_s:.0f}" if bytes_s > 1.25e6 else f"{8e-6 * bytes_s:.2g}"


def tables(found: Measurement) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return what is shown of a measurement: title, header and rows of each table."""
    links = [
        [
            f"{link.sender} -> {link.receiver}",
            "none" if link.latency_s is None else f"{1e3 * link.latency_s:.3f}",
            megabits(link.bandwidth_bytes_s),
        ]
        for link in found.links
    ]
    sums = [
        [f"{one.size_bytes / 2**20:g} MiB", f"{1e3 * one.duration_s:.1f}", megabits(one.bandwidth_bytes_s)]
        for one in found.allreduce
    ]
    sums.insert(0, ["8 bytes", f"{1e3 * found.software_s:.1f}", ""])
    return [
        ("Messages between hosts", ["from -> to", "latency, ms", "bandwidth, Mbit/s"], links),
        (
            f"Allreduce of {found.ranks} ranks ({found.transport}, {found.framework})",
            ["tensor", "time, ms", "of a link, Mbit/s"],
            sums,
        ),
    ]


def main() -> None:
    """Measure as a rank; rank 0 tells the result for ``measure_hosts``."""
    rank, found = measure_here()
    if rank == 0:
        tell(found.as_json())


if __name__ == "__main__":
    main()
