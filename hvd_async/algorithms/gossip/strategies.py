"""Which class a configuration's ranks have."""

from __future__ import annotations

from hvd_async.algorithms.gossip.adpsgd import ADPSGDWorker
from hvd_async.algorithms.gossip.config import ALGORITHMS, GossipConfig
from hvd_async.algorithms.gossip.exact_diffusion import ExactDiffusionWorker
from hvd_async.algorithms.gossip.hosts import HierarchicalWorker, HostPairWorker
from hvd_async.algorithms.gossip.noloco import NoLoCoWorker
from hvd_async.algorithms.gossip.outer_worker import OuterWorker
from hvd_async.algorithms.gossip.rank import GossipWorker, PushSumWorker


def worker_class(config: GossipConfig) -> type[GossipWorker]:
    """Return the class of a configuration's workers."""
    kind = ALGORITHMS[config.algorithm]
    if kind.pairs:
        return HostPairWorker if config.local_size > 1 else ADPSGDWorker
    if kind.slow:
        return NoLoCoWorker
    if kind.exact:
        return ExactDiffusionWorker
    if kind.outer is not None:
        return OuterWorker
    return HierarchicalWorker if config.local_size > 1 else PushSumWorker
