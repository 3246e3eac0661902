"""What ``GossipOptimizer`` adds to the class of the Keras optimizer it wraps."""

from __future__ import annotations

from hvd_async.algorithms.gossip.message_exchange import MessageFormat
from hvd_async.algorithms.gossip.message_format import make_post
from hvd_async.algorithms.gossip.plan import GossipPlan
from hvd_async.optimizers.gossip import GossipState, GossipWrapped
from hvd_async.tensorflow.local_mixin import LocalMixin
from hvd_async.tensorflow.local_state import LocalSettings


class Settings(LocalSettings, GossipState):
    """What the wrapper was given, and what it keeps between calls."""


class GossipMixin(LocalMixin, GossipWrapped):
    """Methods of a wrapped Keras optimizer."""

    _async: Settings

    def _async_post(self, plan: GossipPlan) -> MessageFormat:
        self._async_need_built()
        flat, config, sharers = self._async.flat, plan.config, self._async.sharers
        assert flat is not None
        dtype = flat.dtype.as_numpy_dtype
        return make_post(flat.elements, dtype, config.compression, plan.max_messages, sharers, config.local_size)
