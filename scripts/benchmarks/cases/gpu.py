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

from hvd_async.simulation.names import LEADERS, gossip_of

from ..support import cycles, plot
from ..support.arms import PLAIN, need_arm, parse_arms
from ..support.blocks import by_arm
from ..support.intervals import Interval, spread
from ..support.launch import Block, NotHereError, Say
from ..support.ratios import Ratios, mean_seconds
from ..support.report import INTERVAL, Column, Report, Row, chosen, ends, ranged, row

HELP = "ResNet-50 on GPUs: images a second against Horovod's optimizer and plain torch, and what waits for the device"
COLUMNS = (
    Column("dtype", "setting.dtype"),
    Column("arm", "arm"),
    *ranged("images/s", "value", ".0f"),
    Column("of", "setting.baseline"),
    *ranged("ratio", "ratio", ".4f", INTERVAL),
    Column("cycles", "cycles", "d"),
    Column("device waits/step", "cudaDeviceSynchronize", ".1f"),
    Column("stream waits/step", "cudaStreamSynchronize", ".1f"),
)
HOROVOD = "horovod"
PASSED = ("HOROVOD_ENABLE_ASYNC_COMPLETION",)
"""Variables of the environment that the ranks get."""
OURS = {"all": 0.98, "solo": 0.97}
OTHERS = 0.95
"""Wanted shares of the baseline's images a second: EagerOptimizer's, and those of gossip and leader-pull."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The case's own options."""
    parser.set_defaults(ranks=1, arms="plain,horovod,all,solo,sgp,adpsgd,lsgd", repetitions=60, limit=4.0)
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16", help="of the computation (autocast)")
    cycles.add_options(parser, steps=20, wide=0.003, pixels=224, batch=128)
    parser.add_argument("--traces", type=Path, metavar="DIR", help="write the profiler's traces there")


def run(args: argparse.Namespace, say: Say) -> Report:
    """Measure and judge."""
    if args.quick:
        args.steps, args.repetitions, args.limit = min(args.steps, 5), 2, min(args.limit, 2.0)
    arms = parse_arms(args.arms, args.ranks, (PLAIN, HOROVOD), gossip=True, leaders=True, reduced=True)
    if PLAIN in arms and args.ranks > 1:
        raise ValueError(f"--arms: the arm {PLAIN!r} is of one rank")
    baseline = PLAIN if args.ranks == 1 else HOROVOD
    need_arm(baseline, arms)
    if args.traces is not None:
        args.traces.mkdir(parents=True, exist_ok=True)
    devices = visible_devices()
    env = {"CUDA_VISIBLE_DEVICES": ",".join(devices)} | {k: os.environ[k] for k in PASSED if k in os.environ}
    own = {"dtype": args.dtype, "devices": list(range(len(devices)))}
    own["traces"] = None if args.traces is None else str(args.traces.resolve())
    judged = [arm for arm in arms if arm != baseline]
    found = cycles.measure(args, "gpu", arms, baseline, judged, say, env, **own)
    setting = chosen(args, "dtype", "image_size", "batch_size", "steps", baseline=baseline, seed=0)
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
    ratios = Ratios.of(setting["baseline"], timed)
    rows = []
    for arm, mine in by_arm(timed).items():
        images = setting["batch_size"] * len(mine[0]["by_rank"])
        slower = ratios.median(arm)
        over = Interval(1 / slower.value, 1 / slower.high, 1 / slower.low)
        rows.append(
            row(
                arm,
                setting,
                *(spread([images / mean_seconds(block) for block in mine]), "images/s of all ranks"),
                speedup=over.value,
                **ends("ratio", over),
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
        report.at_least(f"{arm}'s images a second over {each['setting']['baseline']}'s", each["ratio"], least)
        waits = each.get("cudaDeviceSynchronize")
        if waits is not None:
            report.wants(f"{arm}'s waits for the device, a step", waits, "0", waits == 0)


def draw(figure: Any, rows: list[Row]) -> None:
    """Images a second, and over the baseline's with their intervals."""
    left, right = figure.subplots(1, 2)
    plot.bars(left, rows, "{dtype}")
    plot.label(left, "median block and spread", "computation in", "images a second")
    plot.points(right, rows, "ratio", rotation=30)
    right.axhspan(OTHERS, 1.0, color="#56B4E9", alpha=0.2)
    title = f"over {rows[0]['setting']['baseline']}'s, 95% interval (shaded: {OTHERS:g} to 1)"
    plot.label(right, title, "arm", "ratio")
    plot.legend(figure, left)
