"""Runs the pages' blocks of Python of one framework, each in a namespace of its own."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import horovod.common.process_sets  # noqa: F401  (one Horovod for both frameworks)
from blocks_table import BLOCKS, whole
from common import Report, arguments


def main() -> None:
    """Report each block's error, None without one."""
    framework = arguments("framework").framework
    rank = int(os.environ["HOROVOD_RANK"])
    folder = Path(os.environ["HVD_ASYNC_TEST_OUT"]) / f"files.{rank}"
    folder.mkdir()
    os.chdir(folder)
    report = Report(rank)
    for name, block in BLOCKS.items():
        if block.framework != framework:
            continue
        error = None
        names: dict[str, object] = {"__name__": name}
        try:
            exec(compile(whole(name), name, "exec", dont_inherit=True), names)
        except Exception:  # noqa: BLE001  (whatever it is, it is reported)
            error = traceback.format_exc()
        report.put(name, error=error)
        if error:
            break  # the other ranks may be elsewhere


if __name__ == "__main__":
    main()
