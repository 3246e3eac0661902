"""Will Horovod and hvd_async work here, and what is to be mended? Exit status 1 if there is a problem.

With --hosts, or under horovodrun: how quick is the network between the hosts?
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvd_async.doctor.checkup import Plan, check_machine
from hvd_async.doctor.findings import Finding, Verdict, as_json, worst
from hvd_async.doctor.network import Measurement
from hvd_async.doctor.network_job import in_a_job, judge_network, measure_here, measure_hosts, tables
from hvd_async.doctor.render import show_findings, show_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "--self-test",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="train something tiny on two ranks, with each framework that is installed",
    )
    parser.add_argument("--local-ranks", type=_count, default=2, metavar="N", help="ranks planned on this machine")
    parser.add_argument("--ranks", type=_count, default=64, metavar="N", help="ranks planned in the whole job")
    parser.add_argument("--limit", type=_seconds, default=120.0, metavar="S", help="seconds for each import or job")
    parser.add_argument(
        "--hosts",
        metavar="H:N,...",
        help="measure the network between these hosts instead, with so many ranks on each, such as node1:1,node2:1; "
        "a rank that horovodrun or mpirun has started does so without it",
    )
    parser.add_argument(
        "--horovodrun",
        metavar="OPTIONS",
        help="options for horovodrun with --hosts, as one word: --horovodrun='--ssh-port 2222'",
    )
    parser.add_argument(
        "--network", metavar="FILE", help="write what was measured as JSON, which hvd_async advise --network reads"
    )
    parser.add_argument("--json", metavar="FILE", help="write what was found as JSON; - for standard output")


def run(arguments: argparse.Namespace) -> int:
    """Check, show, and return the exit status: 1 if there is a problem, else 0.

    Raises:
        ValueError: --network without ranks on hosts, or --hosts does not read like ``h1:1,h2:1``.
        EngineError: the job on the hosts has failed.
    """
    if arguments.hosts:
        more = shlex.split(arguments.horovodrun or "")
        return _finish_network(measure_hosts(arguments.hosts, arguments.limit, more), arguments)
    if in_a_job():
        rank, measured = measure_here()
        # (A launcher ends all ranks when one has failed: also rank 0, which is to print.)
        return _finish_network(measured, arguments) if rank == 0 else 0
    if arguments.network or arguments.horovodrun:
        raise ValueError("--network and --horovodrun are for a measurement: name the hosts, --hosts node1:1,node2:1")
    plan = Plan(arguments.local_ranks, arguments.ranks, arguments.self_test, arguments.limit)
    findings = check_machine(plan)
    return finish(findings, arguments.json)


def finish(findings: list[Finding], target: str | None, more: Mapping[str, Any] | None = None) -> int:
    """Show findings, or write them as JSON to a file or (``-``) to standard output, and return the exit status."""
    if target != "-":
        show_findings(findings)
    if target:
        write_json(as_json(findings, **(more or {})), target)
    return int(worst(findings) is Verdict.PROBLEM)


def _finish_network(measured: Measurement, arguments: argparse.Namespace) -> int:
    """Show, or write, what was measured; returns the exit status."""
    if arguments.json != "-":
        for title, header, rows in tables(measured):
            show_table(title, header, rows)
    if arguments.network:
        write_json(measured.as_json(), arguments.network)
    return finish(judge_network(measured), arguments.json, {"network": measured.as_json()})


def write_json(value: Mapping[str, Any], target: str) -> None:
    """Write JSON to a file, or to standard output (``-``)."""
    text = json.dumps(value, indent=1) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        Path(target).write_text(text, encoding="utf-8")


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number of ranks: take 1 or more")
    return number


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 < number < 86400:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds: take one above 0 and below 86400")
    return number
