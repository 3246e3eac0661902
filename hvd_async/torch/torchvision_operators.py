"""Imports of torchvision with a torch that its compiled operators were not built for."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from pathlib import Path

import torch

_declared: list[torch.library.Library] = []
"""Holds the declarations, which end with the object."""


def declare_torchvision_operators() -> bool:
    """Let torchvision be imported where its compiled operators cannot be loaded.

    PyPI's torchvision is built for CUDA's torch. With a torch for CPUs its import, and that of packages that import it
    (Lightning, Transformers, timm), ends in "operator torchvision::nms does not exist". After this call the import
    succeeds: models, transforms and data sets work, and functions with a compiled operator (``torchvision.ops.nms``)
    raise an error when they are called. Call it before the first import of any of these packages. If a torchvision of
    the same build as torch is available, install that instead.

    Returns:
        Whether the operators had to be declared; False if torchvision is not installed, is imported already, or loads
        its own.
    """
    spec = importlib.util.find_spec("torchvision")
    if _declared or "torchvision" in sys.modules or spec is None or spec.origin is None:
        return False
    try:
        for library in Path(spec.origin).parent.glob("_C*.so"):
            ctypes.CDLL(str(library))
    except OSError:
        declared = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):  # (torchvision registers implementations of these even if they do not exist)
            declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(declared)
        return True
    return False
