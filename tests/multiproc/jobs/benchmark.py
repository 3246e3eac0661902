"""A rank of a benchmark's job: ``benchmark.py JOB``, which is ``python -m scripts.benchmarks.jobs JOB``."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

if __name__ == "__main__":
    runpy.run_module("scripts.benchmarks.jobs", run_name="__main__", alter_sys=True)
