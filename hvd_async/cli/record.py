"""Run a torch training script, unchanged, and record when each rank computes and when it waits.

Run it on every rank: ``torchrun --nproc-per-node 4 -m hvd_async record --out trace train.py --its --own options``, or
``horovodrun -np 4 --gloo python -m hvd_async record ...``. The first optimizer is recorded: Horovod's
DistributedOptimizer, one of this library, or that of a script for torchrun, under DDP, FSDP2 or its own collectives.
"""

from __future__ import annotations

import argparse
import runpy
import sys
import traceback
from pathlib import Path

from hvd_async.traces.recorded import record_what_is_made


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the trace, for all ranks")
    parser.add_argument(
        "--synchronize",
        action="store_true",
        help="wait for the GPU before each mark; without it, times on CUDA are not meaningful",
    )
    parser.add_argument("script", type=Path, help="the training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own arguments")


def run(arguments: argparse.Namespace) -> int:
    """Run the script; return 1 if it fails.

    Raises:
        ValueError: the script does not exist, or made no optimizer that can be recorded.
    """
    script: Path = arguments.script
    if not script.is_file():
        raise ValueError(f"there is no script {script}: name a Python file, then its own arguments")
    made = record_what_is_made(arguments.out, arguments.synchronize)
    sys.argv = [str(script), *arguments.arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
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
