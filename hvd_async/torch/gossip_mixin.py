"""What ``GossipOptimizer`` adds to the class of the torch optimizer it wraps."""

from __future__ import annotations

from hvd_async.algorithms.gossip.message_exchange import MessageFormat
from hvd_async.algorithms.gossip.plan import GossipPlan
from hvd_async.optimizers.gossip import GossipState, GossipWrapped
from hvd_async.torch.local_mixin import LocalMixin, LocalSettings
from hvd_async.torch.message_format import make_post


class Settings(LocalSettings, GossipState):
    """What the wrapper was given, and what it keeps between calls."""


class GossipMixin(LocalMixin, GossipWrapped):
    """Methods of a wrapped torch optimizer."""

    _async: Settings

    def _async_post(self, plan: GossipPlan) -> MessageFormat:
        self._async_check_parameters()  # groups may have been added since the wrapper was made
        config, sharers = plan.config, self._async.sharers
        return make_post(self._async_read(), config.compression, plan.max_messages, sharers, config.local_size)
