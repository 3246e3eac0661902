"""Cost of an optimizer without stragglers: step times, messages, images per second on a GPU."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts.benchmarks.support.names import LEADERS, SYNCHRONOUS, gossip_of

from ..support.arms import PLAIN, listed, need_arm, parse_arms, variant_of
from ..support.figures import Block, Interval, Ratios, by_arm, everywhere, mean_seconds, spread
from ..support.launch import START, NotHereError, Progress, block_of, measure, repetitions
from ..support.report import Case, Option, Panel, Report, Row, Say, chosen, columns, ends, interval_of, row
from .imbalance import judge_auto

LEAST = 8
"""Repetitions before the ratios' intervals are looked at."""


# -- ratios until they are known well enough ---------------------------------------------------------------------------


def measure_ratios(
    args: argparse.Namespace,
    job: str,
    arms: Sequence[str],
    baseline: str,
    judged: Sequence[str],
    say: Say,
    *,
    make: Callable[[str, int], Block],
    last: Sequence[Block] = (),
    keep: bool = True,
    **how: Any,
) -> list[Block]:
    """Run arms in alternation until the judged arms' ratios are known to ``--wide``, or ``--limit`` minutes have passed
    since the first result.

    Args:
        args: the command line; ``repetitions`` is the largest number of them.
        job: the module's name in ``jobs/``.
        arms: in their order.
        baseline: the arm that ratios are to.
        judged: arms whose ratios must be known well enough.
        say: takes a line of text.
        make: returns an arm's block of a repetition.
        last: blocks that follow.
        keep: whether all arms' models live side by side, on one engine; else each block has its own.
        how: further arguments of ``launch.measure``.
    """
    say(f"repetitions of {len(arms)} blocks of {args.steps} steps, for {args.limit:g} min at most")
    stays = {"keep": True} if keep else {}
    blocks = [make(arm, repetition) | stays for repetition, arm in repetitions(arms, args.repetitions)]
    progress = Progress(len(blocks) + len(last), say)

    def enough(found: list[Block]) -> bool:
        if progress.ends is None:
            return False
        ratios = Ratios(baseline, (block for block in found if not block.get("profile")))
        known = len(ratios.cycles) >= LEAST and ratios.width(judged) <= args.wide
        return known or time.monotonic() > progress.ends

    def tell(block: Block) -> str:
        if progress.ends is None:
            progress.ends = time.monotonic() + args.limit * 60
        return f"{block['arm']}: {mean_seconds(block):.4f} s a step" if "ends" in block["by_rank"][0] else block["arm"]

    limit = 2 * START + args.limit * 60 + 400
    return measure(args, job, [*blocks, *last], say, tell, seconds=limit, progress=progress, enough=enough, **how)


def ratio_options(steps: int, wide: float, pixels: int, batch: int) -> tuple[Option, ...]:
    """Return the options of such a case, with these defaults."""
    return (
        Option("--steps", steps, "timed steps of each block"),
        Option("--wide", wide, "stop when the 95%% interval is so wide each way"),
        Option("--image-size", pixels, "pixels", {"metavar": "N"}),
        Option("--batch-size", batch, "images a rank and step", {"metavar": "N"}),
    )


# -- no_stragglers -----------------------------------------------------------------------------------------------------

JUDGED, BASELINE = ("all", "solo"), "horovod"
DEFAULT_ARMS = "horovod,ddp,all,majority,solo,auto"


def no_stragglers(args: argparse.Namespace, say: Say) -> Report:
    """Measure and judge."""
    keras = args.framework == "tensorflow"
    if keras and args.arms == DEFAULT_ARMS:
        args.arms = "horovod,all,majority,solo,auto"
    arms = parse_arms(args.arms, args.ranks, rivals=("horovod",) if keras else ("horovod", "ddp"))
    need_arm(BASELINE, arms)
    judged = [arm for arm in arms if arm in JUDGED]
    task = {"name": "resnet50", "image_size": args.image_size, "batch": args.batch_size}

    def make(arm: str, repetition: int) -> Block:
        return block_of(arm, repetition, task, steps=args.steps, untimed=1, momentum=0.9)

    found = measure_ratios(args, "timed_keras" if keras else "timed", arms, BASELINE, judged, say, make=make)
    setting = chosen(args, "framework", "image_size", "batch_size", delay=0.0, seed=0)
    report = NO_STRAGGLERS.report(args, ratio_rows(found, setting))
    for each in report.rows:
        if each["arm"] in judged:
            report.at_most(f"{each['arm']}'s step over Horovod's", each["ratio"], 1.03)
            width = interval_of(each, "ratio").width / each["ratio"]
            report.at_most(f"{each['arm']}'s 95% interval, each way", width, args.wide)
    judge_auto(report, report.rows)
    return report


def ratio_rows(blocks: list[Block], setting: Mapping[str, Any]) -> list[Row]:
    """Return a row for each arm; ``value`` is the median block's step time, ``ratio`` the median over repetitions."""
    ratios, rows = Ratios(BASELINE, blocks), []
    for arm, mine in by_arm(blocks).items():
        fresh = [sum(map(fresh_per_second, block["by_rank"])) for block in mine]
        rows.append(
            row(
                *(arm, setting, spread([mean_seconds(block) for block in mine]), "s/step"),
                speedup=1 / ratios.median(arm).value,
                bound=1.0 if arm in SYNCHRONOUS else None,
                **ends("ratio", ratios.median(arm)),
                **ends("ratio_mean", ratios.mean(arm)),
                cycles=len(ratios.cycles),
                fresh_per_s=statistics.median(fresh),
            )
        )
    return rows


def fresh_per_second(own: Mapping[str, Any]) -> float:
    """Return the gradients of staleness 0 per second of a rank; of arms without staleness all are."""
    fresh = own["stats"].get("staleness", {"0": len(own["ends"])}).get("0", 0)
    return float(fresh / own["ends"][-1])


NO_STRAGGLERS = Case(
    name="no_stragglers",
    old_name="balanced",
    help="no delays, real ResNet-50: ratio of step times to Horovod's, repeated until it is known well enough",
    text="The real ResNet-50, no delays: the cost of our optimizers relative to Horovod's own, block by block.",
    run=no_stragglers,
    columns=columns(
        "framework = setting.framework | arm | s/step = value .4f ~ | over horovod = ratio .4f 95% | "
        "cycles = cycles d | fresh/s = fresh_per_s .2f"
    ),
    panels=(Panel("ratio", "points"), Panel()),
    group="{framework}",
    ranks=2,
    arms=DEFAULT_ARMS,
    repetitions=200,
    limit=20.0,
    options=(
        Option("--framework", "torch", "of the model", {"choices": ("torch", "tensorflow")}),
        *ratio_options(steps=4, wide=0.015, pixels=64, batch=16),
    ),
    quick={"arms": "horovod,all,solo", "steps": 2, "repetitions": 2, "limit": 4.0},
)


# -- gpu ---------------------------------------------------------------------------------------------------------------

SETTLED = 15
"""Untimed steps of a block: in the first ten, optimizers check more, and ranks do not agree at the first bucket."""
PASSED = ("HOROVOD_ENABLE_ASYNC_COMPLETION",)
"""Variables of the environment that the ranks get."""
WANTED = {"all": 0.98, "solo": 0.97}
OTHERS_WANTED = 0.95
"""Wanted shares of the baseline's images per second: EagerOptimizer's, and those of gossip and leader-pull."""


def gpu(args: argparse.Namespace, say: Say) -> Report:
    """Measure and judge."""
    how = {"gossip": True, "leaders": True, "compressed": True}
    arms = listed(args.arms)
    parse_arms(",".join(variant_of(arm)[0] for arm in arms), args.ranks, (PLAIN, BASELINE), **how)
    if PLAIN in arms and args.ranks > 1:
        raise ValueError(f"--arms: the arm {PLAIN!r} is of one rank")
    baseline = PLAIN if args.ranks == 1 else BASELINE
    need_arm(baseline, arms)
    devices, traces = visible_devices(), None
    if args.traces is not None:
        args.traces.mkdir(parents=True, exist_ok=True)
        traces = str(args.traces.resolve())
    env = {"CUDA_VISIBLE_DEVICES": ",".join(devices)} | {k: os.environ[k] for k in PASSED if k in os.environ}
    plan = {"devices": list(range(len(devices))), "traces": traces}
    task = {"name": "resnet50", "image_size": args.image_size, "batch": args.batch_size, "dtype": args.dtype}

    def make(arm: str, repetition: int, **more: Any) -> Block:
        base, variant = variant_of(arm)
        return block_of(arm, repetition, task, base=base, momentum=0.9) | {"untimed": SETTLED} | variant | more

    def timed(arm: str, repetition: int) -> Block:
        return make(arm, repetition, steps=args.steps)

    judged = [arm for arm in arms if arm != baseline]
    last = [make(arm, args.repetitions, profile=True, always=True) for arm in arms if args.profile]
    how = {"make": timed, "last": last, "keep": False, "plan": plan, "env": env}
    found = measure_ratios(args, "timed", arms, baseline, judged, say, **how)
    setting = chosen(args, "dtype", "image_size", "batch_size", "steps", baseline=baseline, seed=0)
    staged = os.environ.get("HVD_ASYNC_STAGE", "0") not in ("", "0")
    report = GPU.report(args, gpu_rows(found, setting), transport="gloo, staged" if staged else "nccl")
    for each in report.rows:
        arm = each["arm"]
        if ":" in arm:
            continue
        least = WANTED.get(arm, OTHERS_WANTED if gossip_of(arm) or arm in LEADERS else None)
        if least is not None:
            report.at_least(f"{arm}'s images a second over {baseline}'s", each["ratio"], least)
            waits = each.get("cudaDeviceSynchronize")
            if waits is not None:
                report.wants(f"{arm}'s waits for the device, a step", waits, "0", waits == 0)
    return report


def visible_devices() -> list[str]:
    """Return the GPUs that a job may use; NotHereError if there are none."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        devices = [device for device in given.split(",") if device]
    else:
        try:
            listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
        except FileNotFoundError:
            raise NotHereError("it needs a GPU, and there is no nvidia-smi here") from None
        devices = [str(number) for number, line in enumerate(listed.stdout.splitlines()) if line.startswith("GPU")]
    if not devices:
        raise NotHereError("it needs a GPU, and none is visible (is CUDA_VISIBLE_DEVICES empty?)")
    return devices


def gpu_rows(blocks: list[Block], setting: Mapping[str, Any]) -> list[Row]:
    """Return a row for each arm; ``ratio``: the median over repetitions of its rate over the baseline's."""
    timed = [block for block in blocks if not block.get("profile")]
    traced = {block["arm"]: block["by_rank"][0] for block in blocks if block.get("profile")}
    ratios, rows = Ratios(setting["baseline"], timed), []
    for arm, mine in by_arm(timed).items():
        images, slower = setting["batch_size"] * len(mine[0]["by_rank"]), ratios.median(arm)
        over = Interval(1 / slower.value, 1 / slower.high, 1 / slower.low)
        rates = spread([images / mean_seconds(block) for block in mine])
        more = {"cycles": len(mine), **traced.get(arm, {})}
        rows.append(
            row(arm, setting, rates, "images/s of all ranks", speedup=over.value, **ends("ratio", over), **more)
        )
    return rows


GPU = Case(
    name="gpu",
    help="ResNet-50 on GPUs: images a second against Horovod's and plain torch's, and what waits for the device",
    text="""ResNet-50 on GPUs, half precision, channels last: images per second, with plain torch's and Horovod's.

With one rank nothing is sent, and arms are compared with plain torch: the difference is the optimizer's own cost,
since its rounds run all the same. With several they are compared with Horovod's optimizer. Steps are timed by the
device's own clock, arms in alternation. Afterwards a profiler counts what of each arm's steps waits for the device.""",
    run=gpu,
    columns=columns(
        "dtype = setting.dtype | arm | images/s = value .0f ~ | of = setting.baseline | ratio = ratio .4f 95% | "
        "cycles = cycles d | device waits/step = cudaDeviceSynchronize .1f | "
        "stream waits/step = cudaStreamSynchronize .1f"
    ),
    panels=(Panel(), Panel("ratio", "points")),
    group="{dtype}",
    ranks=1,
    arms="plain,horovod,all,solo,sgp,adpsgd,lsgd",
    repetitions=60,
    limit=4.0,
    options=(
        Option("--dtype", "bf16", "of the computation (autocast)", {"choices": ("bf16", "fp16")}),
        *ratio_options(steps=20, wide=0.003, pixels=224, batch=128),
        Option("--profile", True, "count afterwards what waits for the device"),
        Option("--traces", None, "write the profiler's traces there", {"type": Path, "metavar": "DIR"}),
    ),
    quick={"steps": 5, "repetitions": 2, "limit": 2.0},
)


# -- activation --------------------------------------------------------------------------------------------------------

ASLEEP, BUSY, CPU = "latency, trainers asleep", "latency, trainers busy", "engine's CPU"


def activation(args: argparse.Namespace, say: Say) -> Report:
    """Measure and judge."""
    arms = parse_arms(args.arms, args.cpu_ranks, rivals=())
    latencies = [
        {"arm": "solo", "busy": busy, "rounds": args.rounds, "repetition": repetition}
        for repetition in range(args.repetitions)
        for busy in (False, True)
    ]
    task = {"name": "vectors", "megabytes": args.megabytes}
    cpu = [
        block_of(arm, repetition, task, steps=args.cpu_rounds, lr=0.0, untimed=2)
        for repetition, arm in repetitions(arms, args.repetitions)
    ]
    progress = Progress(len(latencies) + len(cpu), say)

    def tell(block: Block) -> str:
        if "task" in block:
            return f"engine's CPU, {block['arm']}: {cpu_ms(block, 'engine_s'):.2f} ms a round"
        text = "busy" if block["busy"] else "asleep"
        return f"trainers {text}: median {statistics.median(latencies_ms(block)):.2f} ms"

    found = measure(args, "activation", latencies, say, tell, seconds=600, progress=progress)
    found += measure(args, "timed", cpu, say, tell, seconds=900, progress=progress, ranks=args.cpu_ranks)
    report = ACTIVATION.report(args, activation_rows(found))
    for each in report.rows:
        what, value = each["setting"]["what"], each["value"]
        if what == ASLEEP:
            report.at_most("median latency, trainers asleep", value, 1.0, "<= 1 ms")
        elif what == CPU:
            size = each["setting"]["megabytes"]
            report.at_most(f"engine's own CPU a round of {size:g} MB, {each['arm']}, ms", value, 5.0, "<= 5 ms")
    return report


def latencies_ms(block: Block) -> list[float]:
    """Return the ms from each round's first arrival to the last engine's receipt of its command."""
    received = zip(*(own["received"] for own in block["by_rank"]), strict=True)
    return [1e3 * (max(times) - begun) for times, begun in zip(received, block["by_rank"][0]["first"], strict=True)]


def cpu_ms(block: Block, key: str) -> float:
    """Return the CPU time per round, ms, mean over the ranks: ``engine_s`` of the engine's thread, or ``cpu``."""
    return 1e3 * statistics.fmean(own[key] / own["stats"]["rounds"] for own in block["by_rank"])


def activation_rows(blocks: list[Block]) -> list[Row]:
    """Return latencies with trainers asleep and busy, then CPU times by arm. Ends are those over repetitions."""
    rows = []
    for what, busy in ((ASLEEP, False), (BUSY, True)):
        mine = [latencies_ms(block) for block in blocks if "task" not in block and block["busy"] is busy]
        if not mine:
            continue
        ranks = next(len(block["by_rank"]) for block in blocks if "task" not in block)
        every = np.concatenate(mine)
        shares = np.quantile(every, np.arange(1, 100) / 100, method="inverted_cdf").tolist()
        more = {"p95": shares[94], "p99": shares[98], "percentiles": shares, "rounds": len(every)}
        more["curves"] = [[value, percent] for percent, value in enumerate(shares, 1)]
        setting = {"what": what, "ranks": ranks, "curve": True, "seed": None}
        rows.append(row("solo", setting, spread(list(map(statistics.median, mine))), "ms", **more))
    for arm, own in by_arm(block for block in blocks if "task" in block).items():
        setting = {"what": CPU, "ranks": len(own[0]["by_rank"]), "megabytes": own[0]["task"]["megabytes"], "seed": None}
        used = spread([cpu_ms(block, "engine_s") for block in own])
        process = statistics.median(cpu_ms(block, "cpu") for block in own)
        step = statistics.median(each["ends"][-1] / len(each["ends"]) for each in everywhere(own))
        rows.append(row(arm, setting, used, "ms of CPU a round", process_cpu_ms=process, step_s=step))
    return rows


ACTIVATION = Case(
    name="activation",
    help="milliseconds from a round's first arrival to its last receipt; the engine thread's CPU time per round",
    text="The control plane alone: a round's first arrival to the last engine's command; the engine's own CPU time.",
    run=activation,
    columns=columns(
        "what = setting.what | ranks = setting.ranks d | arm | ms = value .3f ~ | 95% below = p95 .3f | "
        "round s = step_s .3f"
    ),
    panels=(Panel(), Panel("curves", "curves", each="what")),
    group="{what}",
    ranks=8,
    arms="all,solo",
    repetitions=3,
    options=(
        Option("--rounds", 300, "without tensors, of each block"),
        Option("--cpu-ranks", 2, "of the job that measures CPU time", {"metavar": "N"}),
        Option("--cpu-rounds", 30, "with tensors, of each block"),
        Option("--megabytes", 100.0, "of gradients, for CPU time"),
    ),
    quick={"rounds": 60, "cpu_rounds": 6, "repetitions": 1},
)
