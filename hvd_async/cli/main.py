"""Commands of ``hvd_async``: for each a function that adds its options, and one that runs it.

A command imports what it needs when it runs: help needs no package, and a recorded script's process holds little else.
"""

from __future__ import annotations

import argparse
import json
import runpy
import shlex
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import hvd_async
from hvd_async.errors import HvdAsyncError

if TYPE_CHECKING:
    from hvd_async.doctor.findings import Finding
    from hvd_async.doctor.network import Measurement
    from hvd_async.simulation.schedule import Schedule

# -- options -----------------------------------------------------------------------------------------------------------

Number = TypeVar("Number", int, float)


def _number(kind: type[Number], is_valid: Callable[[Number], bool], rule: str) -> Callable[[str], Number]:
    """Return a converter of text to a number; ``rule``: human-readable description of valid numbers."""

    def number(text: str) -> Number:
        value = kind(text)
        if not is_valid(value):
            raise argparse.ArgumentTypeError(f"must be {rule}, got {text}")
        return value

    return number


COUNT = _number(int, lambda value: value >= 1, "at least 1")
RANKS = _number(int, lambda value: value >= 2, "at least 2")
POSITIVE = _number(float, lambda value: value > 0, "a number above 0")
NOT_NEGATIVE = _number(float, lambda value: value >= 0, "a number of at least 0")
SHARE = _number(float, lambda value: 0 <= value <= 1, "a number from 0 to 1")
SECONDS = _number(float, lambda value: 0 < value < 86400, "a number of seconds above 0 and below 86400")
TRACE = "folder that `hvd_async record` or hvd_async.torch.record has written"
SKIP = "steps at the start to leave out"
EVERY = "every"
"""Default of --mode and --modes, ``hvd_async.advisor.prediction.EVERY``."""


def _print_json(value: Any) -> None:
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(value), indent=1).decode())


# -- doctor ------------------------------------------------------------------------------------------------------------


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``doctor``."""
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


def run_doctor(arguments: argparse.Namespace) -> int:
    """Will hvd_async work here, and what must be fixed? Exit status 1 if there is a problem.

    With --hosts, or as a rank of a job: how fast is the network between the hosts?

    Raises:
        ValueError: --network without ranks on hosts, or --hosts does not read like ``h1:1,h2:1``.
        EngineError: the job on the hosts has failed.
    """
    from hvd_async.doctor.machine import check_machine
    from hvd_async.doctor.network import in_a_job, measure_here, measure_hosts
    from hvd_async.doctor.software import check_software, read_software, self_test

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
    import msgspec

    from hvd_async.cli.output import show_table
    from hvd_async.doctor.network import judge_network, tables

    value = msgspec.to_builtins(measured)
    if arguments.json != "-":
        for table in tables(measured):
            show_table(table)
    if arguments.network:
        _write(value, arguments.network)
    return _finish(list(judge_network(measured)), arguments.json, network=value)


def _finish(findings: list[Finding], target: str | None, **more: Any) -> int:
    """Show findings, or write them as JSON to a file or (``-``) to standard output, and return the exit status."""
    from hvd_async.cli.output import show_findings
    from hvd_async.doctor.findings import Verdict, findings_as_json, worst

    if target != "-":
        show_findings(findings)
    if target:
        _write(findings_as_json(findings, **more), target)
    return int(worst(findings) is Verdict.PROBLEM)


def _write(value: Mapping[str, Any], target: str) -> None:
    text = json.dumps(value, indent=1) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        Path(target).write_text(text, encoding="utf-8")


# -- demo --------------------------------------------------------------------------------------------------------------


def add_demo(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``demo``."""
    parser.add_argument("--plot", type=Path, metavar="PNG", help="picture to write: .png, .svg or .pdf")
    parser.add_argument("--steps", type=COUNT, default=150, metavar="N", help="of each training")
    parser.add_argument("--limit", type=SECONDS, default=120.0, metavar="S", help="seconds for the whole demo")


def run_demo(arguments: argparse.Namespace) -> int:
    """Train a small network on two ranks of this machine, one of which is late in some steps, under three modes.

    It needs torch, and takes half a minute. Returns 1 if the training fails.

    Raises:
        ValueError: torch is not installed, or ``--plot`` is given without matplotlib.
    """
    import importlib.util
    import tempfile

    from hvd_async.cli.output import draw_modes, need_matplotlib, show_demo
    from hvd_async.doctor.programs import launch_command, run_job
    from hvd_async.traces.format import read_trace

    if importlib.util.find_spec("torch") is None:
        raise ValueError(
            "the demo needs torch: pip install torch --index-url https://download.pytorch.org/whl/cpu (the build for "
            "CPUs, 200 MB)"
        )
    if arguments.plot is not None:
        need_matplotlib()
    print("hvd_async demo: two ranks train three times, half a minute in all", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="hvd_async_demo_") as folder:
        outcome = run_job(launch_command("torch", 2, ["demo", folder, str(arguments.steps)]), arguments.limit)
        if outcome.returncode != 0:
            print(f"{outcome.output}\nhvd_async demo: {outcome.ending(arguments.limit)}", file=sys.stderr)
            return 1
        results = outcome.results()
        show_demo(results, arguments.steps)
        if arguments.plot is not None:
            titles = [f"{each['line']}: {each['seconds']:.1f} s" for each in results]
            traces = [read_trace(Path(folder) / str(number), skip=0, least=1) for number in range(len(results))]
            draw_modes(dict(zip(titles, traces, strict=True)), arguments.plot)
            print(f"\nwrote {arguments.plot}")
    return 0


# -- record ------------------------------------------------------------------------------------------------------------


def add_record(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``record``."""
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the trace, for all ranks")
    waits = "wait for the GPU before each mark; without it, times on CUDA are not meaningful"
    parser.add_argument("--synchronize", action="store_true", help=waits)
    parser.add_argument("-m", action="store_true", dest="module", help="the script is a module, as for python -m")
    parser.add_argument("script", help="the training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own arguments")


def run_record(arguments: argparse.Namespace) -> int:
    """Run a torch training script, unchanged, and record when each rank computes and when it waits.

    It runs on every rank: ``torchrun --nproc-per-node 4 -m hvd_async record --out trace train.py --its --own options``,
    or ``horovodrun -np 4 --gloo python -m hvd_async record ...``; ``-m package.train`` instead of ``train.py`` runs a
    module. The first optimizer is recorded: Horovod's
    DistributedOptimizer, one of this library, or that of a script for torchrun, under DDP, FSDP2 or its own
    collectives. Returns 1 if the script fails.

    Raises:
        ValueError: the script does not exist, or made no optimizer that can be recorded.
        OSError: the folder cannot be written.
    """
    from hvd_async.traces.recorded import record_what_is_made

    script: str = arguments.script
    if not arguments.module and not Path(script).is_file():
        raise ValueError(f"there is no script {script}: name a Python file, or -m and a module, then its own arguments")
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=arguments.out) as tried:  # (before hours of training)
        tried.write(bytes(4096))
    made = record_what_is_made(arguments.out, arguments.synchronize)
    sys.argv = [script, *arguments.arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))  # (of a module's name: the working directory)
    try:
        if arguments.module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except Exception:  # noqa: BLE001  the script's own, shown as Python shows it
        traceback.print_exc()
        return 1
    if not made:
        raise ValueError(
            "nothing was recorded: the script made no optimizer by hvd.DistributedOptimizer in torch or by hvd_async, "
            "and none stepped after torch.distributed.init_process_group(). Launch it by torchrun or horovodrun; in "
            "Keras use RecordCallback, in your own loop a Recorder (docs/advisor.md)"
        )
    return 0


# -- advise ------------------------------------------------------------------------------------------------------------


def add_advise(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``advise``."""
    add = parser.add_argument
    add("trace", type=Path, help=TRACE)
    add("--network", type=Path, metavar="FILE", help="JSON with latency_s and bandwidth_bytes_s")
    add("--bandwidth", type=POSITIVE, metavar="MBIT", help="of a rank's link, in Mbit/s; over --network")
    add("--latency", type=POSITIVE, metavar="MS", help="of a message, one way, in ms; over --network")
    add("--modes", default=EVERY, metavar="NAMES", help="to try, separated by commas")
    add("--skip", type=int, default=3, metavar="N", help=SKIP)
    add("--steps", type=COUNT, metavar="N", help="of each simulated job; by default as in the trace, at most 200")
    add("--resamples", type=COUNT, default=8, metavar="N", help="simulated jobs of each mode")
    add("--seed", type=int, default=0, help="of the resampling")
    add("--all", action="store_true", help="show every mode, and what the simulation does not know")
    add("--json", action="store_true", help="print JSON, with every mode")


def run_advise(arguments: argparse.Namespace) -> int:
    """Learn from a recorded run which ranks are stragglers, and how many steps per second each mode would reach.

    The recorded computation of each rank goes through a simulation of the library's own protocol under each mode.
    Nothing is trained: what a mode costs in accuracy is not predicted.
    """
    import msgspec

    from hvd_async.advisor.advice import Given, advise, read_given
    from hvd_async.advisor.report import advice_as_json
    from hvd_async.cli.output import show_advice
    from hvd_async.traces.format import read_trace

    given = read_given(arguments.network) if arguments.network is not None else Given()
    if arguments.bandwidth is not None:
        given = msgspec.structs.replace(given, bandwidth_bytes_s=arguments.bandwidth * 1e6 / 8)
    if arguments.latency is not None:
        given = msgspec.structs.replace(given, latency_s=arguments.latency / 1e3)
    trace = read_trace(arguments.trace, arguments.skip)
    everything = arguments.all or arguments.json

    def show_progress(line: str) -> None:
        print(f"hvd_async advise: {line}", file=sys.stderr, flush=True)

    found = advise(
        trace, given, arguments.modes, arguments.steps, arguments.resamples, arguments.seed, everything, show_progress
    )
    if arguments.json:
        _print_json(advice_as_json(found))
    else:
        show_advice(found, arguments.all)
    return 0


# -- simulate ----------------------------------------------------------------------------------------------------------


def add_simulate(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``simulate``."""
    add = parser.add_argument
    add("--ranks", type=RANKS, default=8, metavar="N", help="of the job")
    add("--per-host", type=COUNT, default=1, metavar="N", help="ranks of a host, a group under a leader")
    add("--compute", type=POSITIVE, default=0.3, metavar="S", help="seconds of computation in a step")
    add("--slow", type=POSITIVE, default=1.0, metavar="TIMES", help="how much slower the last rank is")
    add("--late", type=NOT_NEGATIVE, default=0.0, metavar="S", help="seconds by which one random rank per step is late")
    add("--vary", type=NOT_NEGATIVE, default=0.0, metavar="SD", help="log-normal deviation of each computation")
    add("--stall", type=NOT_NEGATIVE, default=0.0, metavar="S", help="seconds of a random stall of a rank")
    add("--stall-share", type=SHARE, default=0.01, metavar="P", help="probability of a stall in a step")
    add("--mode", default=EVERY, metavar="NAMES", help="modes, separated by commas")
    add("--megabytes", type=NOT_NEGATIVE, default=100.0, metavar="MB", help="of gradients, and of weights")
    add("--bandwidth", type=POSITIVE, default=10_000.0, metavar="MBIT", help="of a rank's link, Mbit/s")
    add("--latency", type=NOT_NEGATIVE, default=0.3, metavar="MS", help="of a message, one way, in ms")
    add("--steps", type=COUNT, default=200, metavar="N", help="of each rank")
    add("--repetitions", type=COUNT, default=3, metavar="N", help="jobs with different random draws")
    add("--seed", type=int, default=0, help="of the random draws")
    add("--json", action="store_true", help="print JSON")


def run_simulate(arguments: argparse.Namespace) -> int:
    """Simulate a job under several modes: the library's own protocol, simulated ranks, simulated time.

    Each rank computes for --compute seconds in a step, longer if it is slow, late, varies, or stalls.
    """
    from hvd_async.advisor.prediction import named_modes, simulated
    from hvd_async.advisor.report import modes_as_json, what
    from hvd_async.cli.output import show_table
    from hvd_async.simulation.network import Network

    modes = named_modes(arguments.ranks, arguments.mode)
    jobs = [_computation(arguments, arguments.seed + number) for number in range(arguments.repetitions)]
    link = Network(latency=arguments.latency / 1e3, bandwidth=arguments.bandwidth * 1e6 / 8, cycle=0.001)
    base, *others = simulated(jobs, link, arguments.megabytes * 1e6, modes, 0, arguments.seed, arguments.per_host)
    found = [base, *sorted(others, key=lambda each: -each.gain.mean)]
    if arguments.json:
        _print_json(modes_as_json(found))
    else:
        show_table(what(found))
        print(f"\nAssumed:\n{_assumptions(arguments)}")
    return 0


def _assumptions(arguments: argparse.Namespace) -> str:
    """Return the assumptions of a simulation, in words."""
    parts = [
        f"{arguments.ranks} ranks, {arguments.per_host} per host, {arguments.steps} steps, {arguments.repetitions} jobs"
        " with different random draws",
        f"{arguments.compute:g} s of computation in a step",
        f"the last rank {arguments.slow:g} times slower",
        f"one random rank per step {arguments.late:g} s late",
        f"varied by a log-normal factor of deviation {arguments.vary:g}",
        f"stalls of {arguments.stall:g} s with probability {arguments.stall_share:g}",
        f"{arguments.megabytes:g} MB of gradients, and of weights",
        f"links of {arguments.bandwidth:g} Mbit/s, each way at once; {arguments.latency:g} ms per message",
        "collectives start every 1 ms, after the computation, in one piece; no cores or links are shared",
    ]
    return "\n".join(
        [
            *(f"- {part}" for part in parts),
            "Synchronous SGD waits for all ranks in every step. Accuracy is not simulated.",
        ]
    )


def _computation(arguments: argparse.Namespace, seed: int) -> Schedule:
    """Return the seconds that each rank computes in each step, [steps, ranks]."""
    import numpy as np

    from hvd_async.simulation.schedule import lengths, one_slow, stalls

    steps, ranks = arguments.steps, arguments.ranks
    found: Schedule = one_slow(steps, ranks, arguments.compute, arguments.slow)
    found = found * lengths(steps, ranks, 1.0, arguments.vary, seed)
    found = found + stalls(steps, ranks, 0.0, arguments.stall, arguments.stall_share, seed)
    found[np.arange(steps), np.random.default_rng(seed).integers(ranks, size=steps)] += arguments.late
    return found


# -- plot --------------------------------------------------------------------------------------------------------------


def add_plot(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``plot``."""
    parser.add_argument("trace", type=Path, help=TRACE)
    parser.add_argument("--out", type=Path, required=True, metavar="PNG", help="picture to write: .png, .svg or .pdf")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="first step to draw, after those left out")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="number of steps to draw")
    parser.add_argument("--skip", type=int, default=3, metavar="N", help=SKIP)


def run_plot(arguments: argparse.Namespace) -> int:
    """Draw a recorded run, a row per rank: when it computed, waited for others, updated its weights."""
    from hvd_async.cli.output import draw
    from hvd_async.traces.format import read_trace

    draw(read_trace(arguments.trace, arguments.skip, least=1), arguments.out, arguments.first, arguments.steps)
    print(f"wrote {arguments.out}")
    return 0


# -- the entry point ---------------------------------------------------------------------------------------------------


class Command(NamedTuple):
    """A command.

    Attributes:
        line: of ``hvd_async --help``.
        add_arguments: adds its options to its parser.
        run: runs it and returns the exit status; the first paragraph of the docstring is its description.
    """

    line: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


COMMANDS = {
    "doctor": Command("will hvd_async work on this machine, and how fast is its network?", add_doctor, run_doctor),
    "demo": Command("train on two ranks of this machine, one of them late, under three modes", add_demo, run_demo),
    "record": Command(
        "run a training script and record when each rank computes and when it waits", add_record, run_record
    ),
    "advise": Command(
        "learn from a recorded run which ranks are stragglers, and what each mode would bring", add_advise, run_advise
    ),
    "simulate": Command("simulate a job under several modes", add_simulate, run_simulate),
    "plot": Command("draw a recorded run: when each rank computed, and when it waited", add_plot, run_plot),
}


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    about = (
        "Optimizers that do not wait for slow ranks: check a machine, record a job, learn what would make it faster."
    )
    parser = argparse.ArgumentParser("hvd_async", description=about)
    parser.add_argument("--version", action="version", version=f"hvd_async {hvd_async.__version__}")
    several = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        description = (command.run.__doc__ or "").split("\n\n")[0]
        formatter = argparse.ArgumentDefaultsHelpFormatter
        own = several.add_parser(name, help=command.line, description=description, formatter_class=formatter)
        command.add_arguments(own)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status."""
    parser = make_parser()
    parsed = parser.parse_args(arguments)
    try:
        return COMMANDS[parsed.command].run(parsed)
    except (HvdAsyncError, ValueError, OSError) as error:
        parser.exit(2, f"hvd_async {parsed.command}: {error}\n")
