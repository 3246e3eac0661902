"""The torch job of ``profile``: steps that compute next to nothing, and what each thread uses for them."""

from __future__ import annotations

import torch

from .shared.arm import Arm
from .shared.rank import Block, Job
from .shared.thread_usage import PARAMETERS, copy_ms, used_by


def run_block(job: Job, block: Block) -> None:
    """One arm."""
    torch.manual_seed(0)
    elements = int(block["megabytes"] * 1e6 / 4 / PARAMETERS)
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(elements)) for _ in range(PARAMETERS)])
    arm = Arm(block["arm"], model, job, torch.optim.SGD(model.parameters(), lr=0.0))

    def loss(trained: torch.nn.Module) -> torch.Tensor:
        total: torch.Tensor = sum(parameter.sum() for parameter in trained.parameters())  # type: ignore[assignment]
        return total

    arm.warm_up(loss)
    job.barrier()
    own = used_by(lambda: arm.train(loss), block["steps"])
    arm.drain()
    flat = torch.zeros(elements * PARAMETERS)
    there = torch.zeros_like(flat)
    job.conclude(arm, block, {"used": own, "copy_ms": copy_ms(lambda: there.copy_(flat))})
