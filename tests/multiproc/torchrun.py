"""Runs commands under ``torchrun``, also as on a machine without Horovod."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from launch import JOB_VARIABLE, sweep

REPOSITORY = Path(__file__).parents[2]
HIDDEN = ("HOROVOD_", "OMPI_", "HVD_ASYNC_", "MASTER_", "TORCHELASTIC_")


def without_horovod(folder: Path) -> dict[str, str]:
    """Return variables under which ``import horovod`` fails, by a package of that name in ``folder``."""
    stub = folder / "horovod"
    stub.mkdir(parents=True)
    (stub / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'horovod'\", name='horovod')\n")
    return {"PYTHONPATH": f"{folder}{os.pathsep}{REPOSITORY}"}


def torchrun(
    arguments: Sequence[str], ranks: int = 2, env: Mapping[str, str] | None = None, timeout: float = 150.0
) -> str:
    """Run a script, or ``-m`` and a module, on so many ranks of this machine; returns what all of them printed.

    Raises:
        AssertionError: it failed, or took longer than ``timeout`` seconds.
    """
    job = uuid.uuid4().hex
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(HIDDEN)},
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        JOB_VARIABLE: job,
        **(env or {}),
    }
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    with subprocess.Popen(
        [*launcher, *arguments],
        cwd=REPOSITORY,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            sweep(job, 0.0)  # (ranks are sessions of their own)
            output, _ = process.communicate()
            raise AssertionError(f"{arguments} took longer than {timeout:g} s:\n{output[-8000:]}") from None
    assert process.returncode == 0, f"{arguments}: exit {process.returncode}\n{output[-8000:]}"
    return output
