"""Rank 1 of a job stands still, as in a debugger or on a machine that is suspended: ``--seconds N``."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import time

from common import Report, integers
from ends import SHAPE, TorchRank

VICTIM = 1


def stand_still(seconds: int) -> None:
    """Stop this process; another one lets it go on."""
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=int)
    options = parser.parse_args()
    framework = TorchRank()
    rank = framework.hvd.rank()
    report = Report(rank)
    optimizer = framework.wrap("solo")
    for step in range(1, 10_000):
        if rank == VICTIM and step == 4:
            report.put("still")
            stand_still(options.seconds)
        try:
            framework.step(optimizer, integers(SHAPE, rank, step, 0))
        except Exception as error:
            report.put("error", kind=type(error).__name__, text=str(error))
            raise
        time.sleep(0.005)


if __name__ == "__main__":
    main()
