"""Will Horovod and hvd_async work here, and what must be fixed? Exit status 1 if there is a problem.

With --hosts, or under horovodrun: how fast is the network between the hosts?
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from hvd_async.cli.numbers import COUNT, SECONDS
from hvd_async.doctor.findings import Finding, Verdict, as_json, show_findings, show_table, worst
from hvd_async.doctor.machine import check_machine
from hvd_async.doctor.network import Measurement, in_a_job, judge_network, measure_here, measure_hosts, tables
from hvd_async.doctor.software import check_software, read_software, self_test


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    trains = "train something tiny on two ranks, with each framework that is installed"
    add("--self-test", action=argparse.BooleanOptionalAction, default=True, help=trains)
    add("--local-ranks", type=COUNT, default=2, metavar="N", help="ranks planned on this machine")
    add("--ranks", type=COUNT, default=64, metavar="N", help="ranks planned in the job")
    add("--limit", type=SECONDS, default=120.0, metavar="S", help="seconds for each import or job")
    measures = (
        "measure the network between these hosts instead, with N ranks on each, such as node1:1,node2:1; "
        "a rank that horovodrun or mpirun has started does so without it"
    )
    add("--hosts", metavar="H:N,...", help=measures)
    options = "options for horovodrun with --hosts, as one word: --horovodrun='--ssh-port 2222'"
    add("--horovodrun", metavar="OPTIONS", help=options)
    add("--network", metavar="FILE", help="write the measurement as JSON, for hvd_async advise --network")
    add("--json", metavar="FILE", help="write the findings as JSON; - for standard output")


def run(arguments: argparse.Namespace) -> int:
    """Check, show the findings, and return the exit status: 1 if there is a problem, else 0.

    Raises:
        ValueError: --network without ranks on hosts, or --hosts does not read like ``h1:1,h2:1``.
        EngineError: the job on the hosts has failed.
    """
    if arguments.hosts:
        options = shlex.split(arguments.horovodrun or "")
        return _finish_network(measure_hosts(arguments.hosts, arguments.limit, options), arguments)
    if in_a_job():
        rank, measured = measure_here()
        # (If a rank fails, a launcher ends all ranks, including rank 0, which prints.)
        return _finish_network(measured, arguments) if rank == 0 else 0
    if arguments.network or arguments.horovodrun:
        raise ValueError("--network and --horovodrun are for a measurement: name the hosts, --hosts node1:1,node2:1")
    software = read_software(arguments.limit)
    findings = [
        *check_software(software),
        *check_machine(arguments.local_ranks, arguments.ranks, bool(software.versions["tensorflow"])),
        *(self_test(software, arguments.limit) if arguments.self_test else ()),
    ]
    return _finish(findings, arguments.json)


def _finish_network(measured: Measurement, arguments: argparse.Namespace) -> int:
    """Show a measurement, or write it, and return the exit status."""
    value = msgspec.to_builtins(measured)
    if arguments.json != "-":
        for title, header, rows in tables(measured):
            show_table(title, header, rows)
    if arguments.network:
        _write(value, arguments.network)
    return _finish(list(judge_network(measured)), arguments.json, network=value)


def _finish(findings: list[Finding], target: str | None, **more: Any) -> int:
    """Show findings, or write them as JSON to a file or (``-``) to standard output, and return the exit status."""
    if target != "-":
        show_findings(findings)
    if target:
        _write(as_json(findings, **more), target)
    return int(worst(findings) is Verdict.PROBLEM)


def _write(value: Mapping[str, Any], target: str) -> None:
    text = json.dumps(value, indent=1) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        Path(target).write_text(text, encoding="utf-8")
