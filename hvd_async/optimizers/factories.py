"""Checks of the arguments of wrappers, and the drivers made from them; common to both bindings."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from hvd_async.algorithms.eager.config import EagerOptions
from hvd_async.algorithms.gossip.config import COMPRESSIONS, GossipOptions
from hvd_async.algorithms.leader.config import LeaderOptions
from hvd_async.optimizers.eager import EagerDriver, GradientReplica
from hvd_async.optimizers.gossip import GossipDriver
from hvd_async.optimizers.leader import LeaderDriver
from hvd_async.optimizers.replica import WeightReplica
from hvd_async.runtime.lifecycle import Lifecycle
from hvd_async.runtime.log import users_line
from hvd_async.runtime.process_sets import RankGroup, rank_group_of

# -- arguments that all wrappers share with Horovod --------------------------------------------------------------------


class HorovodArguments:
    """Arguments that Horovod's wrappers have in both frameworks. Each binding has a dataclass of its framework's
    arguments, these among them, in Horovod's order and with Horovod's defaults."""

    optimizer: Any
    compression: Any
    backward_passes_per_step: int
    op: Any
    gradient_predivide_factor: float
    num_groups: int
    groups: Any
    process_set: Any

    @property
    def grouping(self) -> Any:
        """``groups``, or Horovod's older ``num_groups``."""
        return self.num_groups if self.groups is None and self.num_groups else self.groups


class EagerArguments(EagerOptions, HorovodArguments):
    """Arguments of every ``EagerOptimizer``."""


class GossipArguments(GossipOptions, HorovodArguments):
    """Arguments of every ``GossipOptimizer``."""


class LeaderArguments(LeaderOptions, HorovodArguments):
    """Arguments of every ``LeaderOptimizer``."""


def check_compression(compression: Any) -> None:
    """Check that ``compression`` can compress gradients.

    Raises:
        ValueError: it lacks ``compress`` or ``decompress``.
    """
    if not (callable(getattr(compression, "compress", None)) and callable(getattr(compression, "decompress", None))):
        raise ValueError(
            f"compression must be hvd.Compression.none, .fp16, .bf16, or a class with compress(tensor) and "
            f"decompress(tensor, ctx), got {compression!r}, which cannot compress gradients"
        )


def check_passes(backward_passes_per_step: int) -> None:
    """Check the number of backward passes per step.

    Raises:
        ValueError: it is not an integer of at least 1.
    """
    passes = backward_passes_per_step
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise ValueError(f"backward_passes_per_step must be an integer of at least 1, got {passes!r}")


def scales(op: Any, average: Any, total: Any, predivide: float, size: int) -> tuple[float, float]:
    """Return the factor of a gradient before the sum over the ranks, and the factor of the sum.

    Args:
        op: the user's ``op``, of Horovod.
        average, total: ``hvd.Average`` and ``hvd.Sum``.
        predivide: Horovod's ``gradient_predivide_factor``.
        size: number of ranks whose gradients are averaged.

    Raises:
        ValueError: partial allreduce does not support the operation, or the factor is invalid with it.
    """
    if op not in (average, total):
        raise ValueError(
            f"op={op!r} does not go with partial allreduce, whose rounds add gradients up (Adasum, minimum and maximum "
            f"need all ranks' gradients at once): take hvd.Average or hvd.Sum"
        )
    if isinstance(predivide, bool) or not isinstance(predivide, int | float) or not 0 < predivide < float("inf"):
        raise ValueError(f"gradient_predivide_factor must be a finite number above 0, got {predivide!r}")
    if op == total:
        if predivide != 1.0:
            raise ValueError("gradient_predivide_factor splits the division of op=hvd.Average: leave it out with Sum")
        return 1.0, 1.0
    return 1.0 / predivide, predivide / size


def check_local(given: HorovodArguments, average: Any, whose: str) -> None:
    """Refuse arguments of Horovod that have no meaning if ranks exchange weights instead of gradients.

    Args:
        given: the user's arguments.
        average: ``hvd.Average``.
        whose: name of the method in messages.

    Raises:
        ValueError: such an argument was passed, or ``backward_passes_per_step`` is invalid.
    """
    if given.op != average:
        raise ValueError(f"op must be hvd.Average, since {whose} averages weights, got {given.op!r}: leave op out")
    if given.gradient_predivide_factor != 1.0:
        raise ValueError(f"gradient_predivide_factor: gradients stay on their rank in {whose}; leave it out")
    if given.groups or given.num_groups:
        raise ValueError(f"groups, num_groups: a rank's weights travel as one message in {whose}; leave them out")
    check_passes(given.backward_passes_per_step)


def compression_name(compression: Any, known: Mapping[str, Any]) -> str:
    """Return the name of the compression of gossip's messages.

    Args:
        compression: a name, or one of the values of ``known``.
        known: the binding's compressors by name.

    Raises:
        ValueError: it is not in ``known``. (The library encodes messages itself, without user classes.)
    """
    for name, compressor in known.items():
        if compression is compressor or compression == name:
            return name
    raise ValueError(
        f"compression of messages must be hvd.Compression.{', .'.join(known)}, or one of these names, got "
        f"{compression!r}"
    )


def host_size(hierarchical: Any, hvd: Any, everyone: bool) -> int:
    """Return the number of ranks per host that step together, or are averaged before they gossip; 1 for none.

    Args:
        hierarchical: True for Horovod's local ranks, False for none, or a number of ranks, numbered host by host.
        hvd: Horovod's module, which knows the hosts if ``hierarchical`` is True.
        everyone: whether all ranks of the job share the optimizer, not only a process set.

    Raises:
        ValueError: hosts have different sizes, ranks are not numbered host by host, ``hierarchical`` is True with a
            process set, or it is neither a bool nor an integer of at least 1.
    """
    if isinstance(hierarchical, bool):
        return local_ranks(hvd, everyone, "hierarchical=True", "leave it out") if hierarchical else 1
    if not isinstance(hierarchical, int) or hierarchical < 1:
        raise ValueError(f"hierarchical must be True, False, or the number of ranks per host, got {hierarchical!r}")
    return hierarchical


def local_ranks(hvd: Any, everyone: bool, asked: str, instead: str) -> int:
    """Return Horovod's number of ranks per host.

    Args:
        hvd: Horovod's module.
        everyone: whether all ranks of the job are meant, not only a process set.
        asked, instead: the user's argument, and the alternative to it, for messages.

    Raises:
        ValueError: hosts have different sizes, ranks are not numbered host by host, or a process set was passed.
    """
    if not everyone:
        raise ValueError(
            f"{asked} counts the ranks of a host, and some may be outside the process set: pass the number of ranks of "
            f"a host that are inside"
        )
    local, hosts = int(hvd.local_size()), int(hvd.cross_size())
    if local * hosts != hvd.size() or hvd.rank() != hvd.cross_rank() * local + hvd.local_rank():
        raise ValueError(
            f"{asked} needs the same number of ranks on each host, numbered host by host: start them like this "
            f"(horovodrun -H a:4,b:4), or {instead}"
        )
    return local


# -- drivers -----------------------------------------------------------------------------------------------------------


A = TypeVar("A", bound=EagerArguments)
D = TypeVar("D", bound=EagerDriver)


@dataclass(frozen=True)
class Binding:
    """Parts of a framework's binding that its factories need.

    Attributes:
        hvd: Horovod's module for the framework.
        lifecycle: lifecycle of the process's engine.
        compression: class with the binding's compressors as attributes.
    """

    hvd: Any
    lifecycle: Lifecycle
    compression: Any

    def rank_group(self, given: HorovodArguments) -> RankGroup:
        """Return the ranks that share the optimizer."""
        return rank_group_of(given.process_set, self.hvd.global_process_set, *self.lifecycle.world())


def eager_driver(
    binding: Binding,
    given: A,
    replica: Callable[[A, RankGroup, tuple[float, float]], GradientReplica],
    driver: type[D],
) -> D:
    """Return the driver of an ``EagerOptimizer``.

    Args:
        binding: the factory's binding.
        given: the factory's arguments.
        replica: makes the replica from checked arguments, the ranks, and the factors of a gradient and of a round's
            sum.
        driver: class of the driver.

    Raises:
        ValueError: an argument is invalid.
    """
    hvd, rank_group = binding.hvd, binding.rank_group(given)
    local = host_size(given.hierarchical, hvd, rank_group.process_set is None)
    given.check(rank_group.named, local)
    if local == rank_group.named > 1:  # (with a single host, its ranks wait only for each other)
        given = dataclasses.replace(given, quorum="all")
    check_passes(given.backward_passes_per_step)
    check_compression(given.compression)
    factors = scales(given.op, hvd.Average, hvd.Sum, given.gradient_predivide_factor, rank_group.size)
    if given.num_groups and given.groups is None:
        warnings.warn("num_groups is Horovod's older name: pass groups=", DeprecationWarning, stacklevel=users_line())
    return driver(binding.lifecycle, rank_group, replica(given, rank_group, factors), given, local)


def gossip_driver(
    binding: Binding, given: GossipArguments, replica: Callable[[RankGroup], WeightReplica]
) -> GossipDriver:
    """Return the driver of a ``GossipOptimizer``; arguments and errors as in ``eager_driver``."""
    hvd, rank_group = binding.hvd, binding.rank_group(given)
    check_local(given, hvd.Average, "gossip")
    given.check(rank_group.named)
    known = {name: getattr(binding.compression, name) for name in COMPRESSIONS}
    compression = compression_name(given.compression, known)
    local = host_size(given.hierarchical, hvd, rank_group.process_set is None)
    return GossipDriver(binding.lifecycle, rank_group, replica(rank_group), given, compression, local)


def leader_driver(
    binding: Binding, given: LeaderArguments, replica: Callable[[RankGroup], WeightReplica]
) -> LeaderDriver:
    """Return the driver of a ``LeaderOptimizer``; arguments and errors as in ``eager_driver``."""
    hvd, rank_group = binding.hvd, binding.rank_group(given)
    check_local(given, hvd.Average, "LeaderOptimizer")
    given.check(rank_group.named)
    if given.compression is not binding.compression.none:
        raise ValueError("compression: a leader's weights are sent uncompressed; leave it out")

    def ranks_of_a_host() -> int:
        return local_ranks(hvd, rank_group.process_set is None, "group='host'", "pass group=[[0, 1], ...]")

    return LeaderDriver(binding.lifecycle, rank_group, replica(rank_group), given, ranks_of_a_host)
