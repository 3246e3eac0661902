"""Tensors on the CPU, by which ``hvd_async doctor`` measures what Horovod's collectives take; and Horovod itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvd_async.torch.horovod_api import hvd

FRAMEWORK = f"torch {torch.__version__}"
horovod: Any = hvd


def floats(count: int) -> torch.Tensor:
    """Return so many zeros, float32."""
    return torch.zeros(count)


def raw(count: int) -> torch.Tensor:
    """Return so many bytes, uint8."""
    return torch.zeros(count, dtype=torch.uint8)


def counts(numbers: Sequence[int]) -> torch.Tensor:
    """Return numbers as int32."""
    return torch.tensor(numbers, dtype=torch.int32)
