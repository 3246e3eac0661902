"""The real ResNet-50 on GPUs, half precision, channels last: images a second, beside plain torch's and Horovod's.

With one rank nothing travels, and arms are compared with plain torch: what differs is what an optimizer costs by
itself, for its rounds run all the same. With several they are compared with Horovod's optimizer. Steps are timed by the
device's own clock, arms in alternation. Afterwards a profiler counts what of each arm's steps waits for the device.
"""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path
from typing import Any

from ..support import plot
from ..support.intervals import spread
from ..support.launch import Block, NotHereError, Say
from ..support.launch import run as run_job
from ..support.ratios import Ratios, mean_seconds
from ..support.report import Column, Goal, Report, Row, row
from ..support.schedule import LEADERS, PLAIN, gossip_of, parse_arms

HELP = "ResNet-50 on GPUs: images a second against Horovod's optimizer and plain torch, and what waits for the device"
COLUMNS = (
    Column("dtype", "setting.dtype"),
    Column("arm", "arm"),
    Column("images/s", "value", ".0f"),
    Column("low", "low", ".0f"),
    Column("high", "high", ".0f"),
    Column("of", "setting.baseline"),
    Column("ratio", "ratio", ".4f"),
    Column("95% from", "ratio_low", ".4f"),
    Column("to", "ratio_high", ".4f"),
    Column("cycles", "cycles", "d"),
    Column("device waits/step", "cudaDeviceSynchronize", ".1f"),
    Column("stream waits/step", "cudaStreamSynchronize", ".1f"),
)
HOROVOD = "horovod"
PASSED = ("HOROVOD_ENABLE_ASYNC_COMPLETION",)
"""Of the environment, what the ranks get."""
LEAST = 8
"""Cycles before the interval is looked at."""
OURS = {"all": 0.98, "solo": 0.97}
OTHERS = 0.95
"""Of the baseline's images a second: EagerOptimizer's, and those of gossip and leader-pull."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The case's own options."""
    parser.set_defaults(ranks=1, arms="plain,horovod,all,solo,sgp,adpsgd,lsgd", repetitions=60, limit=4.0)
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16", help="of the computation (autocast)")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each block")
    parser.add_argument("--wide", type=float, default=0.003, help="stop when the 95%% interval is so wide each way")
    parser.add_argument("--image-size", type=int, default=224, metavar="N", help="pixels")
    parser.add_argument("--batch-size", type=int, default=128, metavar="N", help="images a rank and step")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="write the profiler's traces there")


def run(args: argparse.Namespace, say: Say) -> Report:
    """Measure and judge."""
    if args.quick:
        args.steps, args.repetitions, args.limit = min(args.steps, 5), 2, min(args.limit, 2.0)
    arms = parse_arms(args.arms, args.ranks, (PLAIN, HOROVOD), gossip=True, leaders=True, reduced=True)
    if PLAIN in arms and args.ranks > 1:
        raise ValueError(f"--arms: the arm {PLAIN!r} is of one rank")
    baseline = PLAIN if args.ranks == 1 else HOROVOD
    if baseline not in arms:
        raise ValueError(f"--arms: the case needs the arm {baseline!r}, to which the others are compared")
    if args.traces is not None:
        args.traces.mkdir(parents=True, exist_ok=True)
    devices = visible_devices()
    plan = {
        "arms": arms,
        "baseline": baseline,
        "judged": [arm for arm in arms if arm != baseline],
        "steps": args.steps,
        "least": LEAST,
        "most": args.repetitions,
        "wide": args.wide,
        "seconds": args.limit * 60,
        "dtype": args.dtype,
        "image_size": args.image_size,
        "batch_size": args.batch_size,
        "devices": list(range(len(devices))),
        "traces": None if args.traces is None else str(args.traces.resolve()),
    }
    say(f"cycles of {len(arms)} blocks of {args.steps} steps, for {args.limit:g} min at most")
    ratios = Ratios(baseline)
    cycle: dict[str, float] = {}

    def on_block(block: Block) -> None:
        if block["cycle"] is None:
            return
        cycle[block["arm"]] = mean_seconds(block)
        if len(cycle) == len(arms):
            ratios.add(cycle)
            say(f"cycle {block['cycle'] + 1}: {', '.join(f'{arm} {ratios.median(arm).value:.3f}' for arm in arms)}")
            cycle.clear()

    env = {"CUDA_VISIBLE_DEVICES": ",".join(devices)} | {k: os.environ[k] for k in PASSED if k in os.environ}
    found = run_job("gpu", args.ranks, plan, limit=args.limit * 60 + 400, on_block=on_block, env=env)
    setting = {name: getattr(args, name) for name in ("dtype", "image_size", "batch_size", "steps")}
    setting |= {"baseline": baseline, "seed": 0}
    staged = os.environ.get("HVD_ASYNC_STAGE", "0") not in ("", "0")
    transport = "gloo, staged" if staged else "nccl"
    report = Report("gpu", args.ranks, rows_of(found, setting), COLUMNS, transport=transport, draw=draw)
    judge(report)
    return report


def visible_devices() -> list[str]:
    """The GPUs that a job may use.

    Raises:
        NotHereError: there is none.
    """
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


def rows_of(blocks: list[Block], setting: dict[str, Any]) -> list[Row]:
    """One row an arm; ``value`` is the median block's, ``ratio`` the median over cycles of its rate over the
    baseline's."""
    timed = [block for block in blocks if block["cycle"] is not None]
    traced = {block["arm"]: block["by_rank"][0] for block in blocks if block["cycle"] is None}
    arms = list(dict.fromkeys(block["arm"] for block in timed))
    ratios = Ratios.of(setting["baseline"], timed)
    rows = []
    for arm in arms:
        mine = [block for block in timed if block["arm"] == arm]
        images = setting["batch_size"] * len(mine[0]["by_rank"])
        rate = spread([images / mean_seconds(block) for block in mine])
        over = ratios.median(arm)
        rows.append(
            row(
                arm,
                setting,
                *(rate.value, "images/s of all ranks", rate.low, rate.high),
                speedup=1 / over.value,
                ratio=1 / over.value,
                ratio_low=1 / over.high,
                ratio_high=1 / over.low,
                cycles=len(mine),
                **traced.get(arm, {}),
            )
        )
    return rows


def judge(report: Report) -> None:
    """Add what must show: of the baseline's images a second, and that nothing waits for the whole device."""
    for each in report.rows:
        arm = each["arm"]
        least = OURS.get(arm, OTHERS if gossip_of(arm) or arm in LEADERS else None)
        if least is None:
            continue
        name = f"{arm}'s images a second over {each['setting']['baseline']}'s"
        report.goals.append(Goal(name, each["ratio"], f">= {least:g}", each["ratio"] >= least))
        waits = each.get("cudaDeviceSynchronize")
        if waits is not None:
            report.goals.append(Goal(f"{arm}'s waits for the device, a step", waits, "0", waits == 0))


def draw(figure: Any, rows: list[Row]) -> None:
    """Images a second, and over the baseline's with their intervals."""
    left, right = figure.subplots(1, 2)
    plot.bars(left, rows, [rows[0]["setting"]["dtype"]], lambda each: each["setting"]["dtype"])
    plot.label(left, "median block and spread", "computation in", "images a second")
    names = [each["arm"] for each in rows]
    for place, each in enumerate(rows):
        fill, _ = plot.colour(each["arm"], names)
        sides = plot.sides(each["ratio"], each["ratio_low"], each["ratio_high"])
        style = {"color": fill, "markeredgecolor": "black", "ecolor": "black", "capsize": 5, "markersize": 9}
        right.errorbar(place, each["ratio"], yerr=sides, fmt="o", **style)
    right.axhspan(OTHERS, 1.0, color="#56B4E9", alpha=0.2)
    right.set_xticks(range(len(names)), names, rotation=30)
    title = f"over {rows[0]['setting']['baseline']}'s, 95% interval (shaded: {OTHERS:g} to 1)"
    plot.label(right, title, "arm", "ratio")
    plot.legend(figure, left)
