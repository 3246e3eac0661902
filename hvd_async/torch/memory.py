"""Memory of vectors that come and go with each step: that of one which nobody holds any more serves the next one."""

from __future__ import annotations

import torch

from hvd_async.runtime.memory import ReusedBlocks
from hvd_async.torch import streams


class ReusedMemory(ReusedBlocks):
    """Blocks for torch's vectors. A block is free when the last tensor on it is gone, views and Horovod's references
    included. On a GPU torch keeps its memory by itself."""

    def empty(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return a tensor of so many bytes, uint8, with whatever was there before."""
        if streams.gpu.has_allocator(device):
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        return torch.from_numpy(self.take(nbytes))
