"""The wrappers for Keras 3 on TensorFlow: ``EagerOptimizer``, ``GossipOptimizer`` and ``LeaderOptimizer``.

They work in ``fit()`` and in custom ``GradientTape`` loops. Before them is what they share: which optimizers cannot be
wrapped, and how the others are. A ``LossScaleOptimizer`` stays around a wrapped optimizer: ``ScaleMethods`` and its
subclasses have the methods of that.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import KW_ONLY, dataclass
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from hvd_async.algorithms.option import option, takes
from hvd_async.errors import ReplicaStateError
from hvd_async.optimizers import factories, methods
from hvd_async.optimizers.driver import Driver, derived, made_by
from hvd_async.optimizers.eager import EagerDriver
from hvd_async.optimizers.factories import Binding, HorovodArguments
from hvd_async.optimizers.methods import OptimizerMethods
from hvd_async.runtime.process_sets import RankGroup
from hvd_async.tensorflow.apply_round import RoundTransform
from hvd_async.tensorflow.collectives import LIFECYCLE
from hvd_async.tensorflow.eager_methods import EagerMethods, take_step
from hvd_async.tensorflow.gradient_format import Codec, Compression
from hvd_async.tensorflow.gradient_replica import GradientReplica
from hvd_async.tensorflow.methods import GossipMethods, LeaderMethods
from hvd_async.tensorflow.variables import own_name, raw
from hvd_async.tensorflow.weight_replica import WeightReplica

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


# -- what can be wrapped, and how --------------------------------------------------------------------------------------


BINDING = Binding(hvd, LIFECYCLE, Compression)
MULTI_OPTIMIZER = getattr(keras.optimizers, "MultiOptimizer", ())
"""Optimizer of several, each of its own variables (recent versions of Keras)."""


def check_backend(error: type[Exception] = ValueError) -> None:
    """Raise an error of this class (``ImportError`` in an import) if Keras runs on another backend than TensorFlow."""
    backend = keras.config.backend()
    if backend != "tensorflow":
        raise error(
            f"Keras' backend must be 'tensorflow' for hvd_async's Keras optimizers and callbacks, got {backend!r}. Set "
            f"KERAS_BACKEND=tensorflow in the environment before Keras is imported (or 'backend' in "
            f"~/.keras/keras.json); a torch model in a loop of its own takes hvd_async.torch"
        )


def check_optimizer(optimizer: Any) -> None:
    """Check that an optimizer can be wrapped.

    Raises:
        ValueError: it cannot be wrapped.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise ValueError(
            f"optimizer must be a Keras 3 optimizer, got {type(optimizer).__name__}. Pass one of keras.optimizers"
        )
    if isinstance(inner, MULTI_OPTIMIZER):
        raise ValueError(
            "a MultiOptimizer cannot be wrapped: pass one optimizer for all variables or, in a loop of your own, wrap "
            "one for each part of them"
        )
    if type(inner).__module__ == "horovod._keras":
        raise ValueError(
            "this is Horovod's own DistributedOptimizer, which does not average on Keras 3: wrap the plain Keras "
            "optimizer instead"
        )
    if isinstance(optimizer, OptimizerMethods) or isinstance(inner, OptimizerMethods):
        raise ValueError("this optimizer averages over ranks already: wrap the plain one")


def wrap(optimizer: Any, driver: Driver, methods: type, scale_methods: type, name: str | None) -> Any:
    """Return an optimizer of a class that has the methods; a ``LossScaleOptimizer`` goes around it again.

    Args:
        optimizer: as the user gave it.
        driver: of the new one.
        methods: of its class.
        scale_methods: of that of a ``LossScaleOptimizer`` around it.
        name: of the outermost; None: as it was.
    """
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    given = optimizer.inner_optimizer if scaled else optimizer
    outer = wrapped = derived(given, methods)
    vars(wrapped).pop("apply", None)  # (of an optimizer that is wrapped again)
    vars(given)["apply"] = functools.partial(_refuse, type(given).__name__)
    if scaled:
        outer = derived(optimizer, scale_methods)
        vars(outer)["inner_optimizer"] = wrapped
    if name is not None:
        vars(outer)["name"] = name
    for one in {type(outer), type(wrapped)}:
        _name_as_wrapped(one)
    driver.attach(wrapped)
    return outer


def _name_as_wrapped(made: Any) -> None:
    """Have Keras save instances of a derived class under the name, if any, for which the wrapped class is registered;
    files load the latter."""
    name = keras.saving.get_registered_name(made._wrapped_class)
    package, registered, own = name.partition(">")
    if registered:
        objects = keras.saving.get_custom_objects()
        loaded = objects.get(name, made._wrapped_class)
        keras.saving.register_keras_serializable(package, own)(made)
        objects[name] = loaded


def _refuse(name: str, *_: Any, **__: Any) -> None:
    """Raise: a step of an optimizer that was given to a wrapper averages nothing."""
    raise ReplicaStateError(
        f"this {name} was wrapped, and its own steps average nothing: use the optimizer that the wrapper returned, "
        "optimizer = hvd.EagerOptimizer(optimizer)"
    )


# -- loss scaling ------------------------------------------------------------------------------------------------------
# Keras skips a step when a gradient overflows. Under partial allreduce the other ranks would wait for it; so there each
# rank has its own scale: gradients are unscaled before other ranks see them, and a step that overflows is handed over
# empty. A rank with weights of its own may take any number of steps, so Keras' own ``apply`` is right.


class ScaleMethods(methods.OptimizerMethods):
    """Methods of every ``LossScaleOptimizer`` whose ``inner_optimizer`` is wrapped: they call that optimizer's driver.
    Under partial allreduce overflows are in ``stats().gradients_skipped``."""

    inner_optimizer: Any

    @property
    def _async(self) -> Any:
        return self.inner_optimizer._async

    def register_local_var(self, variable: Any) -> None:
        """Call the inner optimizer's method."""
        self.inner_optimizer.register_local_var(variable)

    def get_state(self: Any) -> dict[str, np.ndarray[Any, Any]]:
        """Return the inner optimizer's state, and this rank's scale."""
        return self.inner_optimizer.get_state() | {name: raw(v).numpy() for name, v in _scale(self).items()}

    def set_state(self: Any, state: dict[str, np.ndarray[Any, Any]]) -> None:
        """Restore what ``get_state`` returned; raises as the inner optimizer's."""
        own = _scale(self)
        self.inner_optimizer.set_state({name: value for name, value in state.items() if name not in own})
        for name, variable in own.items():
            if name in state:
                variable.assign(state[name])


class EagerScaleMethods(ScaleMethods, methods.EagerMethods):
    """Methods of ``EagerOptimizer`` on a ``LossScaleOptimizer`` whose inner one is an EagerOptimizer too."""

    built: bool

    def record_samples(self, samples: Any) -> None:
        """Call the inner optimizer's method."""
        self.inner_optimizer.record_samples(samples)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        """Unscale the gradients and take a step with them; adjust the scale.

        Args:
            grads: of the scaled loss, one a variable.
            trainable_variables: as in Keras.
        """
        if not self.built:
            with tf.init_scope():
                self.build(list(trainable_variables))
                self.built = True
        loss_scale = raw(self.dynamic_scale) + 0.0
        finite = take_step(self.inner_optimizer, list(grads), trainable_variables, loss_scale)
        scale, counter = raw(self.dynamic_scale), raw(self.step_counter)
        grown = tf.equal(counter, tf.cast(self.dynamic_growth_steps - 1, counter.dtype))
        factor = tf.where(finite, tf.where(grown, 2.0, 1.0), 0.5)
        scale.assign(scale * tf.cast(factor, scale.dtype))
        counter.assign(tf.where(tf.logical_and(finite, tf.logical_not(grown)), counter + 1, tf.zeros_like(counter)))


class GossipScaleMethods(ScaleMethods, methods.GossipMethods):
    """Methods of ``GossipOptimizer`` on a ``LossScaleOptimizer`` whose inner one is a GossipOptimizer too. A
    step that overflows on a rank is none of its steps."""


class LeaderScaleMethods(ScaleMethods, methods.LeaderMethods):
    """Methods of ``LeaderOptimizer`` on a ``LossScaleOptimizer`` whose inner one is a LeaderOptimizer too. A
    step that overflows on a rank is none of its steps."""

    record_loss, scale_loss = LeaderMethods.record_loss, LeaderMethods.scale_loss


def _scale(optimizer: Any) -> dict[str, Any]:
    """Return the variables of the loss scale by name."""
    return {own_name(v): v for v in (optimizer.dynamic_scale, optimizer.step_counter)}


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
    check_optimizer(given.optimizer)
    driver = made_by(lambda: factories.gossip_driver(BINDING, given, lambda ranks: WeightReplica(ranks.size, given)))
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
    check_optimizer(given.optimizer)
    driver = made_by(lambda: factories.leader_driver(BINDING, given, lambda ranks: WeightReplica(ranks.size, given)))
    return wrap(given.optimizer, driver, LeaderMethods, LeaderScaleMethods, given.name)
