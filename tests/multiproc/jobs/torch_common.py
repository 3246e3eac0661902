"""What the torch jobs share: a small model and its data, checksums, whole-number training."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from typing import Any

import torch
from common import WHOLE_DTYPES, integers, whole_start

torch.set_num_threads(1)
DEVICE = torch.device(os.environ.get("HVD_ASYNC_TEST_DEVICE", "cpu"))
"""Where models and batches are; made on the CPU, so that they are the same everywhere."""
torch.backends.cudnn.allow_tf32 = False
torch.backends.cudnn.deterministic = True


def crc(tensors: Iterable[torch.Tensor]) -> int:
    """CRC-32 over the bytes of all tensors, in order."""
    value = 0
    for tensor in tensors:
        value = zlib.crc32(tensor.detach().cpu().contiguous().numpy().tobytes(), value)
    return value


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The optimizer's state, ordered by parameter and by name. (``state_dict()`` may be refused in mid-training.)"""
    states = [optimizer.state.get(p, {}) for group in optimizer.param_groups for p in group["params"]]
    values = [state[key] for state in states for key in sorted(state)]
    return [torch.as_tensor(value) for value in values if value is not None]


def mlp(seed: int) -> torch.nn.Sequential:
    """8 -> 16 -> 4."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)).to(DEVICE)


class Batches:
    """A rank's own random batches of the MLP."""

    def __init__(self, rank: int) -> None:
        self._generator = torch.Generator().manual_seed(1000 + rank)

    def backward(self, model: torch.nn.Module) -> None:
        """One batch: gradients into ``p.grad``."""
        x = torch.randn(16, 8, generator=self._generator)
        y = torch.randint(0, 4, (16,), generator=self._generator)
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(x.to(DEVICE)), y.to(DEVICE)).backward()


class Whole:
    """Parameters and gradients of whole numbers."""

    def __init__(self) -> None:
        self.parameters = [
            torch.nn.Parameter(torch.tensor(start, dtype=getattr(torch, dtype), device=DEVICE))
            for start, dtype in zip(whole_start(), WHOLE_DTYPES, strict=True)
        ]

    def set_gradients(self, rank: int, step: int) -> None:
        """``p.grad`` of this rank's step."""
        for index, p in enumerate(self.parameters):
            p.grad = torch.tensor(integers(tuple(p.shape), rank, step, index), dtype=p.dtype, device=DEVICE)

    def weights(self) -> list[list[float]]:
        """The weights now."""
        return [p.detach().double().reshape(-1).tolist() for p in self.parameters]

    def sgd(self) -> Any:
        """Plain SGD with learning rate 1 over the parameters."""
        return torch.optim.SGD(self.parameters, lr=1.0)
