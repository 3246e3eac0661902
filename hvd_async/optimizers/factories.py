"""Drivers made from a factory's arguments: what both bindings do with the same ones. They are checked first."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from hvd_async.algorithms.eager.config import EagerOptions
from hvd_async.algorithms.eager.quorum import AUTO
from hvd_async.algorithms.gossip.config import COMPRESSIONS, GossipOptions
from hvd_async.algorithms.leader.config import LeaderOptions
from hvd_async.algorithms.option import picked
from hvd_async.optimizers.eager import EagerDriver, GradientReplica
from hvd_async.optimizers.gossip import GossipDriver
from hvd_async.optimizers.horovod_options import (
    check_compression,
    check_local,
    check_passes,
    compression_name,
    host_size,
    local_ranks,
    scales,
)
from hvd_async.optimizers.leader import LeaderDriver
from hvd_async.optimizers.replica import WeightReplica
from hvd_async.runtime.lifecycle import Lifecycle
from hvd_async.runtime.process_sets import RankGroup, rank_group_of

Given = Mapping[str, Any]
"""All arguments of a factory, by name."""
D = TypeVar("D", bound=EagerDriver)


@dataclass(frozen=True)
class Binding:
    """A framework's binding, as its factories need it.

    Attributes:
        hvd: Horovod's module for the framework.
        lifecycle: of the process's engine.
        compression: the binding's class of compressors by name.
    """

    hvd: Any
    lifecycle: Lifecycle
    compression: Any

    def rank_group(self, given: Given) -> RankGroup:
        """Return the ranks that share the optimizer."""
        return rank_group_of(given["process_set"], self.hvd.global_process_set, *self.lifecycle.world())


def eager_driver(
    binding: Binding,
    given: Given,
    replica: Callable[[EagerOptions, RankGroup, tuple[float, float], Any], GradientReplica],
    driver: type[D],
) -> D:
    """Return the driver of an ``EagerOptimizer``.

    Args:
        binding: the factory's.
        given: its arguments.
        replica: makes the replica from the options, the ranks, by what a gradient and a round's sum are multiplied,
            and what the user gave as groups.
        driver: its class.

    Raises:
        ValueError: an argument that cannot be.
    """
    hvd, options, rank_group = binding.hvd, picked(EagerOptions, given), binding.rank_group(given)
    local = host_size(options.hierarchical, hvd, rank_group.process_set is None)
    options.check(rank_group.named, local)
    if local == rank_group.named > 1:  # one host: its ranks wait for each other, and for nobody else
        options = dataclasses.replace(options, quorum="all")
    auto_extrapolation = options.weight_prediction == AUTO
    options = options.resolved(1 if rank_group.size == 1 else rank_group.named // local)
    check_passes(given["backward_passes_per_step"])
    check_compression(given["compression"])
    factors = scales(given["op"], hvd.Average, hvd.Sum, given["gradient_predivide_factor"], rank_group.size)
    groups = given["groups"]
    if given["num_groups"] and groups is None:
        warnings.warn("num_groups is Horovod's older name: pass groups=", DeprecationWarning, stacklevel=3)
        groups = given["num_groups"]
    made = replica(options, rank_group, factors, groups)
    config = options.config(local if rank_group.size == rank_group.named else 1)  # (a rank outside is by itself)
    return driver(binding.lifecycle, rank_group, made, options.buffers, config, options.late_cap_mb, auto_extrapolation)


def gossip_driver(binding: Binding, given: Given, replica: Callable[[RankGroup], WeightReplica]) -> GossipDriver:
    """Return the driver of a ``GossipOptimizer``.

    Args:
        binding: the factory's.
        given: its arguments.
        replica: makes the replica.

    Raises:
        ValueError: an argument that cannot be.
    """
    hvd, options, rank_group = binding.hvd, picked(GossipOptions, given), binding.rank_group(given)
    check_local(given, hvd.Average, "gossip")
    options.check(rank_group.named)
    known = {name: getattr(binding.compression, name) for name in COMPRESSIONS}
    compression = compression_name(given["compression"], known)
    local = host_size(options.hierarchical, hvd, rank_group.process_set is None)
    return GossipDriver(binding.lifecycle, rank_group, replica(rank_group), options, compression, local)


def leader_driver(binding: Binding, given: Given, replica: Callable[[RankGroup], WeightReplica]) -> LeaderDriver:
    """Return the driver of a ``LeaderOptimizer``.

    Args:
        binding: the factory's.
        given: its arguments.
        replica: makes the replica.

    Raises:
        ValueError: an argument that cannot be.
    """
    hvd, options, rank_group = binding.hvd, picked(LeaderOptions, given), binding.rank_group(given)
    check_local(given, hvd.Average, "LeaderOptimizer")
    options.check(rank_group.named)
    if given["compression"] is not binding.compression.none:
        raise ValueError("compression: a leader's weights travel as they are; leave it out")

    def ranks_of_a_host() -> int:
        return local_ranks(hvd, rank_group.process_set is None, "group='host'", "pass group=[[0, 1], ...]")

    return LeaderDriver(binding.lifecycle, rank_group, replica(rank_group), options, ranks_of_a_host)
