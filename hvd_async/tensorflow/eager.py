"""``EagerOptimizer`` for Keras 3 on TensorFlow: partial allreduce in ``fit()`` and in custom ``GradientTape`` loops."""

from __future__ import annotations

import warnings
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from hvd_async.algorithms.eager.quorum import Quorum
from hvd_async.optimizers.eager import EagerDriver
from hvd_async.optimizers.horovod_options import check_compression, check_eager_options, check_passes, scales
from hvd_async.optimizers.methods import OptimizerMethods
from hvd_async.runtime.process_sets import sharers_of
from hvd_async.tensorflow.apply_round import RoundTransform
from hvd_async.tensorflow.collectives import LIFECYCLE
from hvd_async.tensorflow.compression import Codec
from hvd_async.tensorflow.eager_methods import EagerMethods
from hvd_async.tensorflow.gradient_replica import GradientReplica
from hvd_async.tensorflow.horovod_names import check_not_horovods
from hvd_async.tensorflow.loss_scaling import EagerScaleMethods
from hvd_async.tensorflow.wrapping import wrap


def EagerOptimizer(  # noqa: N802  a factory named like a class, as Horovod's
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = hvd.Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = hvd.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = hvd.global_process_set,
    scale_local_gradients: bool = True,
    *,
    quorum: Quorum = "solo",
    max_staleness: int = 16,
    grace: float = 0.0,
    seed: int = 0,
    bucket_cap_mb: float = 25.0,
    late_cap_mb: float = 4096.0,
    pace: str = "steps",
    nonfinite: str = "skip",
    round_transform: RoundTransform | None = None,
    model: Any = None,
    buffers: str = "average",
) -> Any:
    """Wrap a Keras 3 optimizer so that its gradients are averaged by partial allreduce (eager-SGD, PPoPP 2020).

    Round t: every rank contributes what it has pending, ``r = (1/P) sum_i pending_i``, and applies ``x <- U(x, r)``;
    a rank that is late contributes nothing now and its gradient goes with the next round. Constructing it does not
    communicate. Compile the model with ``jit_compile=False`` (XLA cannot wait for other ranks).

    Args:
        optimizer: any Keras optimizer on the TensorFlow backend. What is returned shares its variables and takes its
            place; do not use both. A ``LossScaleOptimizer`` becomes one whose overflows count as empty steps; pass it
            for ``mixed_float16``. With Keras' own ``gradient_accumulation_steps`` every micro-batch is a round, of
            which so many make an update; ``backward_passes_per_step`` does the same with less communication.
        name: of the optimizer, as in Horovod.
        device_dense, device_sparse: where vectors are put together, and where sparse gradients are made dense.
        compression: ``hvd.Compression.none``, ``.fp16``, ``.bf16``, or a class with ``compress`` and ``decompress``.
        sparse_as_dense: nothing to do: sparse gradients (of embeddings) always travel as dense ones, so that late ones
            can be added up. Their average is that of Horovod, whose ranks send each other rows.
        gradient_predivide_factor: f divides gradients by f before the sum over the ranks and by P / f after it.
        op: ``hvd.Average`` or ``hvd.Sum`` (then a round is the sum of the gradients it carries).
        backward_passes_per_step: so many ``apply()`` calls are added up on this rank before they are handed over as
            one step; the others return at once. ``iterations`` counts rounds.
        average_aggregated_gradients: divide their sum by their number.
        num_groups: older name of ``groups`` as a number.
        groups: lists of variables that travel together, or into how many groups to part all; variables in no list are
            parted by ``bucket_cap_mb``.
        process_set: the ranks to average over. Every rank of the job wraps the optimizer with it: those outside step
            by themselves.
        scale_local_gradients: as in Horovod it concerns variables of ``register_local_var()``, which is refused here.
        quorum: who must be there for a round to start: "solo" (the first rank), "majority" (a rank drawn anew each
            round), "all" (synchronous SGD), a number of ranks, a fraction of them, or "auto" (the number that brings
            the most fresh gradients per second, learned from the ranks' arrival times).
        max_staleness: rounds a gradient may be late; 0 is synchronous.
        grace: seconds to wait for more ranks once the quorum is there.
        seed: of majority's draw, the same on all ranks.
        bucket_cap_mb: MiB of gradients that travel together. In a graph a bucket leaves while backward still computes
            those of earlier layers (but for loss scaling and ``nonfinite="raise"``, which look at all of them first).
        late_cap_mb: MiB of rounds that may wait for a late rank, of which there are up to ``max_staleness`` + 1: where
            a round (the model's gradients in float32) is too large for that, ``max_staleness`` is lowered, and rank 0
            says so. ``float("inf")`` leaves it alone.
        pace: "steps" (all ranks do the same number of steps, and one that is always slower holds the others up after
            ``max_staleness`` rounds) or "rounds" (it gives fewer gradients; end the job by ``optimizer.rounds`` or the
            callback ``StopAtRounds``).
        nonfinite: what to do where a gradient holds NaN or an infinity: "skip" (hand its bucket over empty; counted in
            ``stats().gradients_skipped``) or "raise" FloatingPointError.
        round_transform: called with the list of a round's average gradients, returns what to apply; for gradient
            clipping and the like: ``lambda grads: tf.clip_by_global_norm(grads, 1.0)[0]``. It is traced once.
        model: the model that is trained, so that ``drain()`` can make its batch-norm statistics agree.
        buffers: how: "average" them, keep each rank's own ("local"), or take rank 0's ("root").

    Returns:
        An instance of the wrapped optimizer's class with the methods of ``EagerMethods``.

    Raises:
        ValueError: an argument that cannot be; the message says what can.
        NotInitializedError: ``hvd.init()`` was not called.
    """
    sharers = sharers_of(process_set, hvd.global_process_set, *LIFECYCLE.world())
    check_eager_options(
        quorum,
        max_staleness,
        grace,
        buffers,
        sharers.named,
        bucket_cap_mb=bucket_cap_mb,
        late_cap_mb=late_cap_mb,
        pace=pace,
        nonfinite=nonfinite,
    )
    check_passes(backward_passes_per_step)
    check_compression(compression)
    Codec(compression, [tf.float32], sharers.size, max_staleness)  # raises if it cannot count as far
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(f"{type(optimizer).__name__} is no Keras 3 optimizer: pass one of keras.optimizers")
    check_not_horovods(optimizer)
    if isinstance(optimizer, OptimizerMethods):
        raise ValueError("this optimizer averages over ranks already: wrap the plain one")
    config = {"quorum": quorum, "max_staleness": max_staleness, "grace": float(grace), "seed": seed, "pace": pace}
    if isinstance(getattr(optimizer, "inner_optimizer", None), OptimizerMethods):
        raise ValueError(
            "the loss scaling must be inside: write EagerOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))"
        )
    replica = GradientReplica(
        sharers,
        max_staleness,
        scales=scales(op, hvd.Average, hvd.Sum, gradient_predivide_factor, sharers.size),
        compression=compression,
        cap_bytes=bucket_cap_mb * 2**20,
        groups=_groups(num_groups, groups),
        passes=backward_passes_per_step,
        average_passes=average_aggregated_gradients,
        nonfinite=nonfinite,
        devices=(device_dense, device_sparse),
        round_transform=round_transform,
        model=model,
    )
    driver = EagerDriver(LIFECYCLE, sharers, replica, buffers, config, late_cap_mb)
    return wrap(optimizer, driver, EagerMethods, EagerScaleMethods, name)


def _groups(num_groups: int, groups: Any) -> Any:
    """Return groups as ``partition`` takes them.

    Raises:
        ValueError: neither a positive number nor lists.
    """
    if num_groups:
        warnings.warn("num_groups is Horovod's older name: pass groups=", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    if groups is None or (isinstance(groups, int) and not isinstance(groups, bool) and groups > 0):
        return groups
    if isinstance(groups, list | tuple) and all(isinstance(group, list | tuple) for group in groups):
        return [list(group) for group in groups]
    raise ValueError(f"groups={groups!r} is neither a number of groups above 0 nor a list of lists of variables")


def DistributedOptimizer(optimizer: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N802  Horovod's name
    """``EagerOptimizer(quorum="all")``: synchronous SGD that is right on Keras 3, where Horovod's does not average."""
    warnings.warn(
        'on Keras 3 DistributedOptimizer is EagerOptimizer(quorum="all"): Horovod\'s own silently does not average',
        stacklevel=2,
    )
    return EagerOptimizer(optimizer, *args, quorum="all", **kwargs)
