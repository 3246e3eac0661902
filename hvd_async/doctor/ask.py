"""A program: imports a framework and Horovod's module for it, and tells what they say of themselves, step by step.

``python -m hvd_async.doctor.ask torch``. In a process of its own, since a build for another version may crash.
"""

from __future__ import annotations

import importlib
import sys

from hvd_async.doctor.processes import tell


def main(framework: str) -> None:
    """Tell the version and GPUs of ``torch`` or ``tensorflow``, then the transports that Horovod has for it."""
    module = importlib.import_module(framework)
    if framework == "torch":
        gpus = module.cuda.device_count()
        cuda = module.version.cuda or ""
    else:
        gpus = len(module.config.list_physical_devices("GPU"))
        cuda = str(module.sysconfig.get_build_info().get("cuda_version", ""))
    tell({"step": "framework", "version": str(module.__version__), "gpus": gpus, "cuda": cuda})
    horovod = importlib.import_module(f"horovod.{framework}")
    built = {name: bool(getattr(horovod, f"{name}_built")()) for name in ("gloo", "mpi", "nccl")}
    tell({"step": "horovod", **built})


if __name__ == "__main__":
    main(sys.argv[1])
