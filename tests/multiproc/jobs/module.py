"""A module that is run as a script: ``module.py NAME ARGUMENT...``, which is ``python -m NAME ARGUMENT...``."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
