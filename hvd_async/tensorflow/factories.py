"""The wrappers for Keras 3 on TensorFlow: ``EagerOptimizer``, ``GossipOptimizer`` and ``LeaderOptimizer``.

They work in ``fit()`` and in custom ``GradientTape`` loops.
"""

from __future__ import annotations

import warnings
from dataclasses import KW_ONLY, dataclass
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_async.algorithms.option import option, takes
from hvd_async.optimizers import factories
from hvd_async.optimizers.driver import made_by
from hvd_async.optimizers.eager import EagerDriver
from hvd_async.optimizers.factories import HorovodArguments
from hvd_async.optimizers.methods import OptimizerMethods
from hvd_async.runtime.process_sets import RankGroup
from hvd_async.tensorflow.apply_round import RoundTransform
from hvd_async.tensorflow.eager_methods import EagerMethods
from hvd_async.tensorflow.gradient_format import Codec
from hvd_async.tensorflow.gradient_replica import GradientReplica
from hvd_async.tensorflow.methods import GossipMethods, LeaderMethods
from hvd_async.tensorflow.weight_replica import WeightReplica
from hvd_async.tensorflow.wrapping import (
    BINDING,
    EagerScaleMethods,
    GossipScaleMethods,
    LeaderScaleMethods,
    check_backend,
    check_optimizer,
    wrap,
)

# -- Horovod's arguments -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KerasArguments(HorovodArguments):
    """Arguments of ``horovod.tensorflow.keras.DistributedOptimizer``, and the option of all wrappers for Keras."""

    optimizer: Any
    name: str | None = None
    device_dense: str = ""
    device_sparse: str = ""
    compression: Any = hvd.Compression.none
    sparse_as_dense: bool = False
    gradient_predivide_factor: float = 1.0
    op: Any = hvd.Average
    backward_passes_per_step: int = 1
    average_aggregated_gradients: bool = False
    num_groups: int = 0
    groups: Any = None
    process_set: Any = hvd.global_process_set
    scale_local_gradients: bool = True
    _: KW_ONLY
    model: Any = option(None, "the model that is trained, so that its batch-norm statistics agree", before="buffers")


# -- partial allreduce -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EagerArguments(factories.EagerArguments, KerasArguments):
    """Arguments of ``EagerOptimizer``."""

    round_transform: RoundTransform | None = option(
        None,
        "called with the list of a round's average gradients, returns what to apply; for gradient clipping and the "
        "like: ``lambda grads: hvd.clip_by_global_norm(grads, 1.0)[0]``. It is traced once",
        before="model",
    )


@takes(EagerArguments)
def EagerOptimizer(given: EagerArguments) -> Any:  # noqa: N802  a factory named like a class, as Horovod's
    """Wrap a Keras 3 optimizer so that its gradients are averaged by partial allreduce (eager-SGD, PPoPP 2020).

    Round t: every rank contributes what it has pending, ``r = (1/P) sum_i pending_i``, and applies ``x <- U(x, r)``;
    a rank that is late contributes nothing now, and its gradient is in the next round. Constructing it does not
    communicate. Compile the model with ``jit_compile=False`` (XLA cannot wait for other ranks).

    In a graph a bucket leaves while backward still computes those of earlier layers, except with loss scaling and
    ``nonfinite="raise"``, which check all gradients first. With ``pace="rounds"`` the callback ``StopAtRounds`` ends
    ``fit()``.

    Args:
        optimizer: any Keras optimizer on the TensorFlow backend. What is returned shares its variables and takes its
            place; do not use both. A ``LossScaleOptimizer`` becomes one whose overflows count as empty steps; pass it
            for ``mixed_float16``. With Keras' own ``gradient_accumulation_steps`` every micro-batch is a round, and an
            update takes that number of rounds; ``backward_passes_per_step`` does the same with less communication.
        name: of the optimizer, as in Horovod.
        device_dense: device on which vectors are concatenated.
        device_sparse: device on which sparse gradients are made dense.
        compression: ``hvd.Compression.none``, ``.fp16``, ``.bf16``, or a class with ``compress`` and ``decompress``.
        sparse_as_dense: no effect: sparse gradients (of embeddings) always travel as dense ones, so that late ones can
            be added up. Their average equals that of Horovod, whose ranks send rows to each other.
        gradient_predivide_factor: f divides gradients by f before the sum over the ranks and by P / f after it.
        op: ``hvd.Average`` or ``hvd.Sum`` (then a round is the sum of the gradients it carries).
        backward_passes_per_step: number of ``apply()`` calls whose gradients are added up on this rank and handed over
            as one step; all but the last return at once. ``iterations`` counts rounds.
        average_aggregated_gradients: divide their sum by their number.
        num_groups: older name of ``groups`` as a number.
        groups: lists of variables that travel together, or the number of groups of all variables; variables in no list
            are split by ``bucket_cap_mb``.
        process_set: the ranks to average over. Every rank of the job wraps the optimizer with it: those outside step
            alone.
        scale_local_gradients: as in Horovod it concerns variables of ``register_local_var()``, which is refused here.
        Own options: see ``EagerArguments``.

    Returns:
        An instance of the wrapped optimizer's class with the methods of ``EagerMethods``.

    Raises:
        ValueError: an argument is invalid, or Keras runs on another backend than TensorFlow; with a hint.
        NotInitializedError: ``hvd.init()`` was not called.
    """
    check_backend()

    def replica(checked: EagerArguments, rank_group: RankGroup, factors: tuple[float, float]) -> GradientReplica:
        # (this raises if it cannot count as far)
        Codec(checked.compression, [tf.float32], rank_group.size, checked.max_staleness)
        optimizer = checked.optimizer
        inner = getattr(optimizer, "inner_optimizer", None)
        if isinstance(inner, OptimizerMethods) and not isinstance(optimizer, OptimizerMethods):
            raise ValueError(
                "the loss scaling must be inside: write EagerOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))"
            )
        check_optimizer(optimizer)
        return GradientReplica(rank_group, checked, factors, _groups(checked.grouping))

    driver = made_by(lambda: factories.eager_driver(BINDING, given, replica, EagerDriver))
    return wrap(given.optimizer, driver, EagerMethods, EagerScaleMethods, given.name)


def _groups(groups: Any) -> Any:
    """Return groups as an argument of ``partition``.

    Raises:
        ValueError: they are neither a positive number nor lists.
    """
    if groups is None or (isinstance(groups, int) and not isinstance(groups, bool) and groups > 0):
        return groups
    if isinstance(groups, list | tuple) and all(isinstance(group, list | tuple) for group in groups):
        return [list(group) for group in groups]
    raise ValueError(f"groups must be an integer of at least 1 or a list of lists of variables, got {groups!r}")


def DistributedOptimizer(optimizer: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N802  Horovod's name
    """Return ``EagerOptimizer(quorum="all")``: synchronous SGD that averages on Keras 3, where Horovod's does not."""
    warnings.warn(
        'on Keras 3 DistributedOptimizer is EagerOptimizer(quorum="all"): Horovod\'s own silently does not average',
        stacklevel=2,
    )
    return EagerOptimizer(optimizer, *args, quorum="all", **kwargs)


# -- weights of their own ----------------------------------------------------------------------------------------------


def _weight_replica(given: GossipArguments | LeaderArguments, ranks: int) -> WeightReplica:
    """Return the replica of an optimizer that ``ranks`` ranks with weights of their own share.

    Raises:
        ValueError: as ``check_optimizer``.
    """
    check_optimizer(given.optimizer)
    return WeightReplica(
        ranks,
        passes=given.backward_passes_per_step,
        average_passes=given.average_aggregated_gradients,
        device_sparse=given.device_sparse,
        scale_local=given.scale_local_gradients,
        model=given.model,
        buffers=given.buffers,
    )


@dataclass(frozen=True, kw_only=True)
class GossipArguments(factories.GossipArguments, KerasArguments):
    """Arguments of ``GossipOptimizer``."""


@takes(GossipArguments)
def GossipOptimizer(given: GossipArguments) -> Any:  # noqa: N802  a factory named like a class, as Horovod's
    """Wrap a Keras 3 optimizer so that each rank steps alone and mixes its weights with its neighbours'.

    Gradients and the optimizer's state stay on their rank; after each local step weights travel, to a few ranks and not
    to all. So learning rates, schedules, clipping, weight decay and moving averages are each rank's own (``drain()``
    averages the moving averages of ``use_ema``). Constructing it does not communicate. Compile the model with
    ``jit_compile=False`` (XLA cannot wait for other ranks). The callbacks of ``hvd_async.tensorflow.keras`` call
    ``set_epoch``.

    Args:
        optimizer: any Keras optimizer on the TensorFlow backend. What is returned shares its variables and takes its
            place; do not use both. With ``mixed_float16`` pass a ``LossScaleOptimizer``, or have Keras put one around;
            a step that overflows is none. With Keras' own ``gradient_accumulation_steps`` the weights are mixed when
            they have moved.
        name: of the optimizer, as in Horovod.
        device_dense: no effect: the vector of all weights is in the CPU's memory.
        device_sparse: device on which sparse gradients are made dense if ``backward_passes_per_step`` adds them up.
        compression: how messages travel: ``hvd.Compression.none``, ``fp16``, ``bf16``, or ``int8``: 8-bit differences
            to the neighbour's estimate (CHOCO-SGD, Koloskova et al., 2019), of local, slowmo and diloco to the anchor.
            The sender keeps the compression error and adds it to a later message.
        sparse_as_dense: no effect: gradients do not travel.
        gradient_predivide_factor: of gradients that travel; refused here.
        num_groups: likewise.
        groups: likewise.
        op: ``hvd.Average``.
        backward_passes_per_step: number of ``apply()`` calls whose gradients are added up on this rank and make one
            step, whose weights are mixed; all but the last return at once. ``iterations`` counts steps.
        average_aggregated_gradients: divide their sum by their number.
        process_set: the ranks that gossip. Every rank of the job wraps the optimizer with it: those outside step
            alone.
        scale_local_gradients: divide gradients of variables of ``register_local_var()``, which are not mixed, by the
            number of ranks, as Horovod does.
        Own options: see ``GossipArguments``.

    Returns:
        An instance of the wrapped optimizer's class with the methods of ``GossipMethods``.

    Raises:
        ValueError: an argument is invalid, or Keras runs on another backend than TensorFlow; with a hint.
        NotInitializedError: ``hvd.init()`` was not called.
    """
    check_backend()
    driver = made_by(lambda: factories.gossip_driver(BINDING, given, lambda ranks: _weight_replica(given, ranks.size)))
    return wrap(given.optimizer, driver, GossipMethods, GossipScaleMethods, given.name)


@dataclass(frozen=True, kw_only=True)
class LeaderArguments(factories.LeaderArguments, KerasArguments):
    """Arguments of ``LeaderOptimizer``."""


@takes(LeaderArguments)
def LeaderOptimizer(given: LeaderArguments) -> Any:  # noqa: N802  a factory named like a class, as Horovod's
    """Wrap a Keras 3 optimizer so that each rank trains alone and is pulled towards a leader, or a center.

    Gradients and the optimizer's state stay on their rank. Constructing it does not communicate. Training losses reach
    it automatically in Keras' ``fit()``, by ``record_loss()`` elsewhere. Compile the model with ``jit_compile=False``
    (XLA cannot call the engine).

    Args:
        optimizer: any Keras optimizer on the TensorFlow backend. What is returned shares its variables and takes its
            place; do not use both. With ``mixed_float16`` pass a ``LossScaleOptimizer``; a step that overflows is none.
        name: of the optimizer, as in Horovod.
        device_dense: no effect: the vector of all weights is in the CPU's memory.
        device_sparse: device on which sparse gradients are made dense if ``backward_passes_per_step`` adds them up.
        compression: of gradients that travel; refused here, as are ``gradient_predivide_factor``, ``num_groups`` and
            ``groups``.
        sparse_as_dense: no effect: gradients do not travel.
        op: ``hvd.Average``.
        backward_passes_per_step: number of ``apply()`` calls whose gradients are added up on this rank and make one
            step.
        average_aggregated_gradients: divide their sum by their number.
        process_set: the ranks that share it. Every rank of the job wraps the optimizer with it: those outside step
            alone.
        scale_local_gradients: divide gradients of variables of ``register_local_var()``, which are not pulled, by the
            number of ranks, as Horovod does.
        Own options: see ``LeaderArguments``.

    Returns:
        An instance of the wrapped optimizer's class with the methods of ``LeaderMethods``.

    Raises:
        ValueError: an argument is invalid, or Keras runs on another backend than TensorFlow; with a hint.
        NotInitializedError: ``hvd.init()`` was not called.
    """
    check_backend()
    driver = made_by(lambda: factories.leader_driver(BINDING, given, lambda ranks: _weight_replica(given, ranks.size)))
    return wrap(given.optimizer, driver, LeaderMethods, LeaderScaleMethods, given.name)
