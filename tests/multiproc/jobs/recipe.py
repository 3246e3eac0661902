"""Runs a script as `python SCRIPT` does, also where the torchvision that is installed was built for another torch.

PyPI's torchvision beside a torch without CUDA cannot load its compiled operators, and then cannot be imported, nor can
what imports it. What the recipes call of it does not need these operators: their schemas are enough.
"""

from __future__ import annotations

import ctypes
import importlib.util
import pathlib
import runpy
import sys
from typing import Any


def mend_torchvision() -> Any:
    """Declare torchvision's operators if its library does not load; what is returned must stay alive."""
    import torch

    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return None
    try:
        ctypes.CDLL(str(pathlib.Path(spec.origin).with_name("_C.so")))
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library
    return None


if __name__ == "__main__":
    del sys.argv[0]
    sys.path[0] = str(pathlib.Path(sys.argv[0]).parent)
    mended = mend_torchvision() if "hvd_async.torch" in pathlib.Path(sys.argv[0]).read_text(encoding="utf-8") else None
    runpy.run_path(sys.argv[0], run_name="__main__")
