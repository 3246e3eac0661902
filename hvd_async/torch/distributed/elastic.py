"""``hvd.elastic`` under torchrun: nothing but the error that says what to use instead."""

from __future__ import annotations

from hvd_async.torch.distributed.world import refusal

__all__ = ["ElasticSampler", "TorchState", "run"]
NOT_HERE = (
    "Elastic training needs horovodrun --host-discovery-script to continue without lost ranks. Under torchrun the end "
    "of a rank ends the job: save checkpoints, and start it with torchrun --max-restarts=N, which restarts all ranks."
)
run, TorchState, ElasticSampler = (
    refusal(f"hvd.elastic.{name}", NOT_HERE) for name in ("run", "TorchState", "ElasticSampler")
)
