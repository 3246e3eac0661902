"""A rank's program: ``python -m scripts.benchmarks.jobs JOB``, started by ``support/launch.py`` under horovodrun.

A job is a module here. It has ``run_block(job, block)``, which is called for one block of the plan after the other, or
``work(job)``, which does all of it; ``main()`` is a program of its own. Those of TensorFlow end in ``_keras``.
"""

from __future__ import annotations

import importlib
import sys

from .rank import Job


def main(name: str) -> None:
    """Run a job's program on this rank."""
    module = importlib.import_module(f".{name}", __package__)
    if hasattr(module, "main"):
        module.main()
        return
    ranks = module if name.endswith("_keras") else importlib.import_module(".arm", __package__)
    hvd, barrier = ranks.begin()
    job = Job(hvd, barrier)
    if hasattr(module, "work"):
        module.work(job)
    else:
        job.each_block(module.run_block)
    job.finish()
    hvd.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
