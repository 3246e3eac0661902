"""Cost of an optimizer without stragglers: step times, work of the host, messages, images per second on a GPU."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvd_async.simulation.names import LEADERS, SYNCHRONOUS, gossip_of

from ..support.arms import DDP_NO_OP, PLAIN, RECORDED, is_eager, named_arms, need_arm, parse_arms
from ..support.figures import (
    Block,
    Interval,
    Ratios,
    by_arm,
    everywhere,
    grouped,
    mean_seconds,
    quantile,
    spread,
)
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
    **how: Any,
) -> list[Block]:
    """Run arms in alternation until the judged arms' ratios are known to ``--wide``, or ``--limit`` minutes are over.

    Args:
        args: the command line; ``repetitions`` is the largest number of them.
        job: the module's name in ``jobs/``.
        arms: in their order.
        baseline: the arm that ratios are to.
        judged: arms whose ratios must be known well enough.
        say: takes a line of text.
        make: returns an arm's block of a repetition. All arms' models live side by side.
        last: blocks that follow.
        how: further arguments of ``launch.measure``.
    """
    say(f"repetitions of {len(arms)} blocks of {args.steps} steps, for {args.limit:g} min at most")
    order = repetitions(arms, args.repetitions)
    blocks = [make(arm, repetition) | {"keep": True, "flowing": True} for repetition, arm in order]
    deadline = time.monotonic() + START + args.limit * 60

    def enough(found: list[Block]) -> bool:
        ratios = Ratios(baseline, (block for block in found if not block.get("profile")))
        known = len(ratios.cycles) >= LEAST and ratios.width(judged) <= args.wide
        return known or time.monotonic() > deadline

    def tell(block: Block) -> str:
        return f"{block['arm']}: {mean_seconds(block):.4f} s a step" if "ends" in block["by_rank"][0] else block["arm"]

    limit = 2 * START + args.limit * 60 + 400
    return measure(args, job, [*blocks, *last], say, tell, seconds=limit, enough=enough, **how)


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
    """Measure and judge; with ``--recorded`` what recording costs."""
    keras = args.framework == "tensorflow"
    if args.recorded and keras:
        raise ValueError("--recorded: it is measured in torch")
    if keras and args.arms == DEFAULT_ARMS:
        args.arms = "horovod,all,majority,solo,auto"
    arms = parse_arms(args.arms, args.ranks, rivals=("horovod",) if keras else ("horovod", "ddp"))
    need_arm(BASELINE, arms)
    judged = [arm for arm in arms if arm in JUDGED]
    if args.recorded:
        arms, judged, args.wide = [BASELINE, RECORDED], [RECORDED], min(args.wide, 0.005)  # (half of what may be lost)
    task = {"name": "resnet50", "image_size": args.image_size, "batch": args.batch_size}

    def make(arm: str, repetition: int) -> Block:
        return block_of(arm, repetition, task, steps=args.steps, untimed=1, momentum=0.9)

    found = measure_ratios(args, "timed_keras" if keras else "timed", arms, BASELINE, judged, say, make=make)
    setting = chosen(args, "framework", "image_size", "batch_size", delay=0.0, seed=0)
    report = NO_STRAGGLERS.report(args, ratio_rows(found, setting))
    for each in report.rows:
        if each["arm"] in judged:
            report.at_most(f"{each['arm']}'s step over Horovod's", each["ratio"], 1.01 if args.recorded else 1.03)
            width = interval_of(each, "ratio").width / each["ratio"]
            report.at_most(f"{each['arm']}'s 95% interval, each way", width, args.wide)
    if not args.recorded:
        judge_auto(report, report.rows)
    return report


def ratio_rows(blocks: list[Block], setting: Mapping[str, Any]) -> list[Row]:
    """Return a row for each arm; ``value`` is the median block's step time, ``ratio`` the median over repetitions."""
    ratios, rows = Ratios(BASELINE, blocks), []
    for arm, mine in by_arm(blocks).items():
        counts = [[own["stats"].get("staleness", {"0": len(own["ends"])}) for own in b["by_rank"]] for b in mine]
        fresh = [
            sum(late.get("0", 0) / own["ends"][-1] for late, own in zip(found, block["by_rank"], strict=True))
            for found, block in zip(counts, mine, strict=True)
        ]
        rows.append(
            row(
                *(arm, setting, spread([mean_seconds(block) for block in mine]), "s/step"),
                speedup=1 / ratios.median(arm).value,
                bound=1.0 if arm in (*SYNCHRONOUS, RECORDED) else None,
                **ends("ratio", ratios.median(arm)),
                **ends("ratio_mean", ratios.mean(arm)),
                cycles=len(ratios.cycles),
                fresh_per_s=statistics.median(fresh),
            )
        )
    return rows


NO_STRAGGLERS = Case(
    name="no_stragglers",
    old_name="balanced",
    help="no delays, real ResNet-50: ratio of step times to Horovod's, repeated until it is known well enough",
    text="""The real ResNet-50, no delays: what our optimizers cost or save against Horovod's own, block by block.

With --recorded: what it costs to record a run for hvd_async advise.""",
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
        Option("--recorded", False, "Horovod's optimizer, recorded or not; torch"),
        *ratio_options(steps=4, wide=0.015, pixels=64, batch=16),
    ),
    quick={"arms": "horovod,all,solo", "steps": 2, "repetitions": 2, "limit": 4.0},
)


# -- gpu ---------------------------------------------------------------------------------------------------------------

PASSED = ("HOROVOD_ENABLE_ASYNC_COMPLETION",)
"""Variables of the environment that the ranks get."""
WANTED = {"all": 0.98, "solo": 0.97}
OTHERS_WANTED = 0.95
"""Wanted shares of the baseline's images per second: EagerOptimizer's, and those of gossip and leader-pull."""


def gpu(args: argparse.Namespace, say: Say) -> Report:
    """Measure and judge."""
    how = {"gossip": True, "leaders": True, "compressed": True}
    arms = parse_arms(args.arms, args.ranks, (PLAIN, BASELINE), **how)
    if PLAIN in arms and args.ranks > 1:
        raise ValueError(f"--arms: the arm {PLAIN!r} is of one rank")
    baseline = PLAIN if args.ranks == 1 else BASELINE
    need_arm(baseline, arms)
    if args.traces is not None:
        args.traces.mkdir(parents=True, exist_ok=True)
    devices = visible_devices()
    env = {"CUDA_VISIBLE_DEVICES": ",".join(devices)} | {k: os.environ[k] for k in PASSED if k in os.environ}
    plan = {"devices": list(range(len(devices))), "traces": None}
    plan["traces"] = None if args.traces is None else str(args.traces.resolve())
    names = {"image_size": args.image_size, "batch": args.batch_size, "dtype": args.dtype}

    def make(arm: str, repetition: int) -> Block:
        return block_of(arm, repetition, {"name": "resnet50", **names}, steps=args.steps, momentum=0.9)

    judged = [arm for arm in arms if arm != baseline]
    last = [block_of(arm, args.repetitions, {}, profile=True, always=True) for arm in arms]
    found = measure_ratios(args, "timed", arms, baseline, judged, say, make=make, last=last, plan=plan, env=env)
    setting = chosen(args, "dtype", "image_size", "batch_size", "steps", baseline=baseline, seed=0)
    staged = os.environ.get("HVD_ASYNC_STAGE", "0") not in ("", "0")
    report = GPU.report(args, gpu_rows(found, setting), transport="gloo, staged" if staged else "nccl")
    for each in report.rows:
        arm = each["arm"]
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
        Option("--traces", None, "write the profiler's traces there", {"type": Path, "metavar": "DIR"}),
    ),
    quick={"steps": 5, "repetitions": 2, "limit": 2.0},
)


# -- host --------------------------------------------------------------------------------------------------------------

JOBS = {"torch": "timed", "tensorflow": "timed_keras"}
OURS = ("all", "solo", "majority", "sgp", "dpsgd", "adpsgd", "local", "lsgd", "easgd")
DEVICES = ("cpu", "fake")
OTHERS = ("horovod", "ddp", DDP_NO_OP)
"""Rival arms, which torch alone has."""
COUNTS = ("aten_calls", "python_calls", "host_waits", "copies", "operators", "crossings", "buckets")
CALLS = {"all": 2800}
"""The most Python and C calls of a step in torch."""
TRAINING = {"all": 1.2, "solo": 1.2, "sgp": 0.8, "adpsgd": 0.8, "lsgd": 0.8}
"""The most CPU time of the training thread over the plain step's in torch, ms."""
OTHER = 1.5
"""The most CPU time of the other threads, ms."""
TRACING = 1.3
"""The most CPU time of a first step in TensorFlow, which traces, over the plain one's."""
COUNTED_BUCKET_MB = 161 * 8 * 4 / 5 / 2**20
"""``bucket_cap_mb`` for five or six buckets of the model, in torch."""
SETTLING = 16
"""Steps before the timed ones."""


def host(args: argparse.Namespace, say: Say) -> Report:
    """Measure and judge, with one rank and with several."""
    arms = named_arms(args.arms, (*OTHERS, *OURS))
    both = [(framework, ranks) for framework in args.framework for ranks in sorted({1, args.ranks})]
    jobs = {(framework, ranks): host_arms(arms, args.device, framework, ranks) for framework, ranks in both}
    progress = Progress(sum(map(len, jobs.values())) * args.repetitions, say)

    def tell(block: Block) -> str:
        of = f"{block['framework']}, {block['ranks']} ranks, {block['device']}, {block['arm']}"
        return f"{of}: {mean_ms(block, 'training_ms'):.2f} ms"

    found: list[Block] = []
    for (framework, ranks), own in jobs.items():
        common = {"framework": framework, "ranks": ranks, "steps": args.steps, "count": True, "untimed": SETTLING}
        common |= {"lr": 1e-6, "momentum": 0.9, "foreach": True}
        blocks = [
            block_of(arm, repetition, {"name": "tensors"}, **common, device=device)
            | {"own": {"bucket_cap_mb": COUNTED_BUCKET_MB} if is_eager(arm) or arm in ("ddp", DDP_NO_OP) else {}}
            for repetition, (device, arm) in repetitions(own, args.repetitions)
        ]
        seconds = START + len(blocks) * (20 + 0.1 * args.steps)
        found += measure(args, JOBS[framework], blocks, say, tell, seconds=seconds, ranks=ranks, progress=progress)
    report = HOST.report(args, host_rows(found))
    judge_host(report)
    return report


def host_arms(arms: Sequence[str], devices: Sequence[str], framework: str, ranks: int) -> list[tuple[str, str]]:
    """Return a job's arms with their devices, the plain optimizer first. (With one rank there is no majority; only our
    arms do other things on a GPU.)"""
    if framework == "tensorflow":
        devices = DEVICES[:1]
    named = [arm for arm in arms if ranks > 1 or arm != "majority"]
    other = () if framework == "tensorflow" else OTHERS
    own = {"cpu": [arm for arm in named if arm in (*OURS, *other)], "fake": [arm for arm in named if arm in OURS]}
    return [(device, arm) for device in devices for arm in (PLAIN, *own[device])]


def mean_ms(block: Block, key: str) -> float:
    """Return a time per step, mean over the ranks: of the training thread, of the others, or of the first step."""
    if key == "first_ms":
        return statistics.fmean(own[key] for own in block["by_rank"])
    training = statistics.fmean(own["training_s"] for own in block["by_rank"])
    process = statistics.fmean(own["cpu"] for own in block["by_rank"])
    return 1e3 * (training if key == "training_ms" else process - training) / float(block["steps"])


def place_of(setting: Mapping[str, Any]) -> tuple[str, int, str]:
    """Return framework, number of ranks and device of a block or a row's setting."""
    return setting["framework"], setting["ranks"], setting["device"]


def host_rows(blocks: list[Block]) -> list[Row]:
    """Return a row for each framework, number of ranks, device and arm: medians over repetitions, for times of the mean
    over the ranks, for counts of the highest rank. ``over`` is the training thread's time minus the plain arm's in the
    same repetition."""
    plain = {(place_of(block), block["repetition"]): block for block in blocks if block["arm"] == PLAIN}
    rows = []
    for (place, arm), mine in grouped(blocks, lambda block: (place_of(block), block["arm"])).items():
        pairs = [(block, plain[place_of(block), block["repetition"]]) for block in mine]
        counted = mine[0]["by_rank"][0]
        names = ["training_ms", "other_ms", *(["first_ms"] if "first_ms" in counted else [])]
        times = {key: spread([mean_ms(block, key) for block in mine]) for key in names}
        over = spread([mean_ms(own, "training_ms") - mean_ms(one, "training_ms") for own, one in pairs])
        figures: Row = dict.fromkeys(COUNTS) | ends("over", over)
        for key in COUNTS:
            if counted.get(key) is not None:
                figures[key] = statistics.median(max(own[key] for own in block["by_rank"]) for block in mine)
        for key, found in times.items():
            figures |= ends(key, found)
        if "first_ms" in times:
            ratios = [mean_ms(own, "first_ms") / mean_ms(one, "first_ms") for own, one in pairs]
            figures["first_over"] = statistics.median(ratios)
        setting = dict(zip(("framework", "ranks", "device"), place, strict=True)) | {"steps": mine[0]["steps"]}
        rows.append(row(arm, setting | {"seed": None}, times["training_ms"], "ms of CPU a step", **figures))
    return rows


def judge_host(report: Report) -> None:
    """Add the limits that our arms must meet. Counts are exact; times are not."""
    plain = {place_of(each["setting"]): each for each in report.rows if each["arm"] == PLAIN}
    for each in (one for one in report.rows if one["arm"] in OURS):
        arm, (framework, ranks, device) = each["arm"], place_of(each["setting"])
        of = f"{framework}, {arm}, {ranks} rank{'s' if ranks > 1 else ''}, {device}"
        if framework == "tensorflow":
            report.at_most(f"CPU time of the first step over plain Keras': {of}", each["first_over"], TRACING)
            continue
        calls, most = each["aten_calls"] - plain[framework, ranks, device]["aten_calls"], most_operators(each)
        report.wants(f"ATen calls over plain torch's: {of}", calls, f"<= {most:g}", calls <= most, exact=True)
        if arm in CALLS and device == "cpu":  # (a fake GPU makes calls of its own)
            calls, most = each["python_calls"], CALLS[arm]
            report.wants(f"Python and C calls: {of}", calls, f"<= {most}", calls <= most, exact=True)
        if arm in TRAINING:
            report.at_most(f"training thread over plain torch's, ms: {of}", each["over"], TRAINING[arm])
            report.at_most(f"other threads, ms: {of}", each["other_ms"], OTHER)


def most_operators(each: Row) -> float:
    """Return the limit of an arm's operators over plain torch's: 8 a bucket, plus 12 to extrapolate updates; 12 in all
    where ranks have weights of their own."""
    if each["buckets"] is None:
        return 12
    return float(8 * each["buckets"] + 12 * (each["arm"] != "all" and each["setting"]["ranks"] > 1))


HOST = Case(
    name="host",
    help="operators, calls and CPU time of one step, with plain torch's, Horovod's and DDP's, 1 rank and several",
    text="""Host cost of a step: operators, calls and CPU time, with the plain optimizer, Horovod and DDP.

The model has as many parameters as ResNet-50, of 8 elements each (in TensorFlow 40, as one graph), so that nothing is
left but the host's work. On a GPU a step is as fast as the plain one only while the host is ahead of the device. On the
device "fake", CPU tensors count as tensors on a GPU: the optimizers do what they do there, and their waits are
counted.""",
    run=host,
    columns=columns(
        "framework = setting.framework | device = setting.device | ranks = setting.ranks d | arm | "
        "ATen calls = aten_calls .0f | Python + C calls = python_calls .0f | host waits = host_waits .1f | "
        "copies = copies .1f | graph's operators = operators .0f | crossings = crossings .1f | buckets = buckets .0f | "
        "training ms = value .2f ~ | over plain = over .2f ~ | other ms = other_ms .2f | first step ms = first_ms .0f"
    ),
    panels=tuple(map(Panel, ("training_ms", "other_ms", "aten_calls", "python_calls", "operators", "first_ms"))),
    group="{framework}, {ranks}, {device}",
    ranks=2,
    arms=",".join((*OTHERS, *OURS)),
    repetitions=5,
    options=(
        Option("--framework", list(JOBS), "torch, tensorflow", {"choices": JOBS}),
        Option("--device", list(DEVICES), "fake: torch's alone", {"choices": DEVICES}),
        Option("--steps", 100, "that are timed, of each block"),
    ),
    quick={"arms": "horovod,all,sgp", "steps": 20, "repetitions": 1},
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
            return f"engine's CPU, {block['arm']}: {engine_ms(block):.2f} ms a round"
        text = "busy" if block["busy"] else "asleep"
        return f"trainers {text}: median {1e3 * statistics.median(last_receipts(block)):.2f} ms"

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


def last_receipts(block: Block) -> list[float]:
    """Return the seconds from each round's first arrival to the last engine's receipt of its command."""
    received = zip(*(own["received"] for own in block["by_rank"]), strict=True)
    return [max(times) - begun for times, begun in zip(received, block["by_rank"][0]["first"], strict=True)]


def per_round(block: Block, key: str) -> float:
    """Return CPU seconds per round, mean over the ranks."""
    return statistics.fmean(own[key] / own["stats"]["rounds"] for own in block["by_rank"])


def engine_ms(block: Block) -> float:
    """Return the CPU time of an engine's thread per round, ms."""
    return 1e3 * per_round(block, "engine_s")


def activation_rows(blocks: list[Block]) -> list[Row]:
    """Return latencies with trainers asleep and busy, then CPU times by arm. Ends are those over repetitions."""
    rows = []
    for what, busy in ((ASLEEP, False), (BUSY, True)):
        mine = [block for block in blocks if "task" not in block and block["busy"] is busy]
        if not mine:
            continue
        medians = spread([1e3 * statistics.median(last_receipts(block)) for block in mine])
        every = [1e3 * seconds for block in mine for seconds in last_receipts(block)]
        setting = {"what": what, "ranks": len(mine[0]["by_rank"]), "curve": True, "seed": None}
        shares = [quantile(every, percent / 100) for percent in range(1, 100)]
        more = {"p95": quantile(every, 0.95), "p99": quantile(every, 0.99), "percentiles": shares, "rounds": len(every)}
        more["curves"] = [[value, percent] for percent, value in enumerate(shares, 1)]
        rows.append(row("solo", setting, medians, "ms", **more))
    for arm, mine in by_arm(block for block in blocks if "task" in block).items():
        setting = {"what": CPU, "ranks": len(mine[0]["by_rank"]), "megabytes": mine[0]["task"]["megabytes"]}
        whole = statistics.median(1e3 * per_round(block, "cpu") for block in mine)
        step = statistics.median(own["ends"][-1] / len(own["ends"]) for own in everywhere(mine))
        used, more = spread(list(map(engine_ms, mine))), {"process_cpu_ms": whole, "step_s": step}
        rows.append(row(arm, setting | {"seed": None}, used, "ms of CPU a round", **more))
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
