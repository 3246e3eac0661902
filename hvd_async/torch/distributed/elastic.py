"""``hvd.elastic`` under torchrun: nothing but the error that says what to use instead."""

from __future__ import annotations

from typing import Any, NoReturn

from hvd_async.torch.distributed.world import no_counterpart

__all__ = ["ElasticSampler", "TorchState", "run"]
NOT_HERE = (
    "Elastic training goes on without lost ranks only under horovodrun --host-discovery-script. Under torchrun the end "
    "of a rank ends the job: save checkpoints, and start it with torchrun --max-restarts=N, which restarts all ranks."
)


def run(func: Any) -> NoReturn:
    """Raise: see ``NOT_HERE``."""
    no_counterpart("hvd.elastic.run", NOT_HERE)


def TorchState(*arguments: Any, **options: Any) -> NoReturn:  # noqa: N802  Horovod's name
    """Raise: see ``NOT_HERE``."""
    no_counterpart("hvd.elastic.TorchState", NOT_HERE)


def ElasticSampler(*arguments: Any, **options: Any) -> NoReturn:  # noqa: N802  Horovod's name
    """Raise: see ``NOT_HERE``."""
    no_counterpart("hvd.elastic.ElasticSampler", NOT_HERE)
