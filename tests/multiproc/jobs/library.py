"""Several topics in one job: ``--framework F --topics A,B --cases all|some|few --sets none|dynamic|static``.

Each topic is a module here with a function ``run``; each of its cases is reported as soon as it is over.
"""

from __future__ import annotations

import argparse
import importlib
import os
from typing import get_args

import psutil
from common import BINDINGS, Part, Report
from leader_table import process_sets
from table import Share


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--framework", choices=tuple(BINDINGS), required=True)
    parser.add_argument("--topics", required=True)
    parser.add_argument("--cases", choices=get_args(Share), default="all")
    parser.add_argument("--sets", choices=("none", "dynamic", "static"), default="none")
    options = parser.parse_args()
    binding = importlib.import_module(BINDINGS[options.framework][0])
    hvd = binding.hvd
    hvd.init(process_sets=process_sets(options.sets, hvd.ProcessSet))
    os.environ["HVD_ASYNC_MACHINE"] = f"host {hvd.rank() // 2}"  # (all are on this one)
    report = Report(hvd.rank())
    for topic in options.topics.split(","):
        importlib.import_module(topic).run(binding, report, Part(options.cases, options.sets))
    commands = [child.cmdline() for child in psutil.Process().children()]
    report.put("control processes", roles=[line[-2] for line in commands if "hvd_async.runtime.relays" in str(line)])
    hvd.shutdown()
    report.put("end")


if __name__ == "__main__":
    main()
