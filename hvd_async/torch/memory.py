"""Memory of vectors that come and go with each step: that of one which nobody holds any more serves the next one."""

from __future__ import annotations

import weakref

import numpy as np
import torch


class ReusedMemory:
    """Memory of vectors on a CPU, kept until ``clear``. (The system gives and takes back large blocks page by page,
    which costs more than to copy as much; on a GPU torch keeps its own.)

    A block is free when the last tensor on it is gone, views and Horovod's references included: its array is.

    Args:
        most: free blocks of one length that are kept: after a late rank has caught up there are many more.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._free: dict[int, list[np.ndarray]] = {}

    def empty(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return a tensor of so many bytes, uint8, with whatever was there before."""
        if device.type != "cpu" or nbytes == 0:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        free = self._free.setdefault(nbytes, [])
        try:
            block = free.pop()  # (another thread may have been quicker)
        except IndexError:
            block = np.empty(nbytes, np.uint8)
        lent = block.view()
        weakref.finalize(lent, _give_back, free, block, self._most).atexit = False
        return torch.from_numpy(lent)

    def clear(self) -> None:
        """Give back what is free now, and later what is still held."""
        self._free = {}


def _give_back(free: list[np.ndarray], block: np.ndarray, most: int) -> None:
    if len(free) < most:
        free.append(block)
