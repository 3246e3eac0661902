"""``EagerOptimizer`` for Keras 3 on TensorFlow: partial allreduce in ``fit()`` and in custom ``GradientTape`` loops.

In a graph, ``apply`` is: one py_function that hands the gradients over and waits for the step's round, then a loop that
fetches each waiting round and applies it with the wrapped optimizer. The same code runs eagerly.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from hvd_async import activation
from hvd_async.eager import EagerWorker, Round
from hvd_async.engine import Engine
from hvd_async.events import EagerConfig, Hyper
from hvd_async.options import check_eager_options, refuse
from hvd_async.rounds import STATE
from hvd_async.tensorflow.buffers import (
    Layout,
    checksum,
    consensus_distance,
    raw,
    signature,
    unify_buffers,
)
from hvd_async.tensorflow.collectives import LIFECYCLE
from hvd_async.wrapping import Wrapped, WrapperState

RoundTransform = Callable[[list[tf.Tensor]], Sequence[tf.Tensor]]


class _Settings(WrapperState):
    """What the wrapper was given, and what it keeps between calls; Keras does not track it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(LIFECYCLE)
        self.options: dict[str, Any] = options["config"]
        self.sparse_as_dense: bool = options["sparse_as_dense"]
        self.round_transform: RoundTransform | None = options["round_transform"]
        self.model: Any = options["model"]
        self.buffer_policy: str = options["buffers"]
        self.layout: Layout | None = None
        self.update: Any = None
        """The ``tf.function`` that applies a round, in one piece: see ``_compile``."""
        self.fetched: deque[Round] = deque()
        """Rounds that this step's ``_hand_over`` has taken and its loop has not applied yet."""
        self.fetching: int | None = None
        """The round that the loop is applying."""
        self.momentum_correction = False
        self.last_lr: tf.Variable | None = None


class EagerMixin(Wrapped):
    """What ``EagerOptimizer`` adds to the class of the optimizer it wraps."""

    _eager: _Settings
    _wrapped_class: ClassVar[type[Any]]

    # -- stepping ---------------------------------------------------------------------------------------------

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        """Hand over the gradients, wait for this step's round, apply every round that is waiting.

        Args:
            grads: one a variable; None counts as zero.
            trainable_variables: as in Keras; those the optimizer was built with if None.

        Raises:
            ReplicaMismatchError: at the first step, if the ranks' weights or settings differ. (Errors raised while a
                ``tf.function`` or ``fit()`` runs arrive inside a ``tf.errors`` exception, with their text.)
        """
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        layout = self._prepare(variables)
        vectors = layout.flatten(self._indexed(list(grads), variables))
        own_lr = self._current_lr()
        if tf.executing_eagerly():
            for _ in range(int(self._hand_over(own_lr, *vectors))):
                lr, *sums = self._fetch()
                self._applied(self._eager.update(lr, *sums))
        else:
            waiting = tf.reshape(_py(self._hand_over, [own_lr, *vectors], tf.int32), [])

            def one_round(done: tf.Tensor) -> tf.Tensor:
                lr, *sums = _py(self._fetch, [done], [tf.float32, *layout.dtypes])
                sums = [tf.ensure_shape(s, spec.shape) for s, spec in zip(sums, layout.specs(), strict=True)]
                finished = _py(self._applied, [self._eager.update(tf.reshape(lr, []), *sums)], tf.int32)
                return done + tf.reshape(finished, [])

            tf.while_loop(lambda done: done < waiting, one_round, [tf.constant(0)], parallel_iterations=1)
        self._set_lr(own_lr)

    def _prepare(self: Any, variables: list[Any]) -> Layout:
        """Build the wrapped optimizer, once, outside of any graph."""
        state = self._eager
        if not self.built:
            with tf.init_scope():
                self.build(variables)
            self.built = True
        if state.layout is None:
            with tf.init_scope():
                state.layout = Layout(self._trainable_variables)
                state.last_lr = tf.Variable(0.0, trainable=False)
                state.update = self._compile(state.layout)
        return state.layout

    def _compile(self: Any, layout: Layout) -> Any:
        """The one graph that applies a round, wherever it is applied: in a training step or in ``drain()``.

        TensorFlow rewrites a graph as a whole, so the same update rounds differently in different surroundings, and
        replicas would drift apart by bits. As a function of its own that is not inlined, called from a function in
        either case, it is rewritten by itself and gives the same bits. (Whole-graph rewriting was seen to differ by
        1e-7 for RMSprop, Lamb, Adagrad, SGD with weight decay; this way by nothing.)
        """
        arguments = [tf.TensorSpec([], tf.float32), *layout.specs()]
        inner = tf.function(
            lambda lr, *sums: self._apply_sums(sums, lr),
            input_signature=arguments,
            autograph=False,
            experimental_attributes={"_noinline": True},
        )
        alone = tf.function(lambda lr, *sums: inner(lr, *sums), input_signature=arguments, autograph=False)
        return lambda lr, *sums: (alone if tf.executing_eagerly() else inner)(lr, *sums)

    def _indexed(self: Any, gradients: list[Any], variables: list[Any]) -> dict[int, tf.Tensor]:
        self._check_variables_are_known(variables)
        indexed = {}
        for gradient, variable in zip(gradients, variables, strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                if not self._eager.sparse_as_dense:
                    raise ValueError(
                        f"the gradient of {variable.path} is sparse: pass sparse_as_dense=True to EagerOptimizer to "
                        f"send it as a dense tensor"
                    )
                gradient = tf.convert_to_tensor(gradient)
            if gradient is not None:
                indexed[self._get_variable_index(variable)] = gradient
        return indexed

    def _hand_over(self: Any, lr: tf.Tensor, *vectors: tf.Tensor) -> np.int32:
        """Python side of a step: returns how many rounds are to be applied."""
        state = self._eager
        self._check_applied()
        hyper: Hyper = [{"learning_rate": float(lr)}]
        rounds = self._worker().step(vectors, hyper)
        state.fetched.extend(round_ for round_ in rounds if round_.gradients)
        return np.int32(len(state.fetched))

    def _fetch(self: Any, _: Any = None) -> list[Any]:
        """The next round of this step: its learning rate, its sums."""
        round_ = self._eager.fetched.popleft()
        self._eager.fetching = round_.index
        return [tf.constant(round_.hyper[0]["learning_rate"], tf.float32), *round_.sums]

    def _applied(self: Any, _: Any = None) -> np.int32:
        """The round that was fetched last is applied: one more is done."""
        self._eager.fetching = None
        return np.int32(1)

    def _check_applied(self: Any) -> None:
        state = self._eager
        if state.fetching is not None or state.fetched:
            index = state.fetching if state.fetching is not None else state.fetched[0].index
            state.broken = f"round {index} could not be applied: the training step was broken off"
            state.fetching = None
            state.fetched.clear()

    def _apply_sums(self: Any, sums: Sequence[tf.Tensor], lr: tf.Tensor) -> tf.Tensor:
        """Apply one round: its average gradient, its learning rate. Returns something to wait for."""
        state = self._eager
        gradients = state.layout.averages(sums, 1.0 / state.size)
        if state.round_transform is not None:
            gradients = list(state.round_transform(gradients))
        self._set_lr(lr)
        if state.momentum_correction:
            self._correct_momentum(lr)
        self._wrapped_class.apply(self, gradients, self._trainable_variables)
        return tf.identity(raw(self.iterations))

    def _correct_momentum(self: Any, lr: tf.Tensor) -> None:
        """Scale velocities by new over old learning rate when a round changes it (Goyal et al., 2017, section 3)."""
        last = self._eager.last_lr
        ratio = tf.where(last > 0, lr / last, 1.0)
        for velocity in getattr(self, "momentums", None) or []:
            if velocity is not None:
                velocity.assign(raw(velocity) * tf.cast(ratio, raw(velocity).dtype))
        last.assign(lr)

    def _has_schedule(self: Any) -> bool:
        return isinstance(self._learning_rate, keras.optimizers.schedules.LearningRateSchedule)

    def _current_lr(self: Any) -> tf.Tensor:
        """This rank's learning rate; 0 stands in where a schedule gives it by ``iterations``, equal on all ranks."""
        return tf.constant(0.0) if self._has_schedule() else tf.cast(raw(self._learning_rate), tf.float32) + 0.0

    def _set_lr(self: Any, lr: tf.Tensor) -> None:
        if not self._has_schedule():
            self._learning_rate.assign(lr)

    # -- the rest of the interface ----------------------------------------------------------------------------

    def finalize_variable_values(self: Any, var_list: Any) -> None:
        """Keras calls this at the end of ``fit()``: with ``use_ema`` it puts the averaged weights in place."""
        if self.use_ema and self._eager.worker is not None:
            self.drain()  # rounds that came later would be applied on top
        self._wrapped_class.finalize_variable_values(self, var_list)

    def consensus_distance(self: Any) -> float:
        """Root mean square distance of the ranks' weights from their mean (0: identical). A collective."""
        return consensus_distance(self._worker().engine, self._trainable_variables)

    def get_state(self: Any) -> dict[str, np.ndarray[Any, Any]]:
        """The wrapped optimizer's variables (iterations, learning rate, velocities ...) by name."""
        return {_own_name(v): raw(v).numpy() for v in self.variables}

    def set_state(self: Any, state: dict[str, np.ndarray[Any, Any]]) -> None:
        """Take back what ``get_state`` gave; the optimizer must be built.

        Raises:
            ValueError: the state is of another optimizer.
        """
        own = {_own_name(v): v for v in self.variables}
        if own.keys() != state.keys():
            differing = ", ".join(sorted(own.keys() ^ state.keys())[:3])
            raise ValueError(f"the state is of another optimizer, or this one is not built: {differing} ...")
        for name, variable in own.items():
            variable.assign(state[name])

    def _new_worker(self: Any, engine: Engine, finish: Callable[[], None]) -> EagerWorker:
        state = self._eager
        if not self.built and state.model is not None:
            self.build(state.model.trainable_variables)
        if not self.built:
            raise ValueError("the optimizer is not built yet: call optimizer.build(model.trainable_variables) first")
        layout = self._prepare(self._trainable_variables)
        config = EagerConfig(**state.options, buckets=len(layout.dtypes))
        return EagerWorker(engine, config, layout.zeros, finish)

    def _fingerprint(self: Any) -> tuple[list[str], list[int]]:
        own_rate = None if self._has_schedule() else id(self._learning_rate)
        held = [v for v in self.variables if id(v) != own_rate]
        names = [f"optimizer {self._wrapped_class.__name__}", *(signature(v) for v in self._trainable_variables)]
        names += [f"{STATE}{_own_name(v)} {tuple(v.shape)}" for v in held]
        return names, [0, *(checksum(v) for v in [*self._trainable_variables, *held])]

    def _finish(self: Any, worker: EagerWorker) -> None:
        state = self._eager
        self._check_applied()
        self._worker()  # raises if that found a round broken off
        own_lr = self._current_lr()

        def apply(round_: Round) -> None:
            if round_.gradients:
                with state.applying(round_.index):
                    state.update(tf.constant(round_.hyper[0]["learning_rate"], tf.float32), *round_.sums)

        with tf.init_scope():
            worker.drain(apply)
            self._set_lr(own_lr)
            if state.model is not None and state.buffer_policy != "local":
                unify_buffers(worker.engine, state.model.non_trainable_variables, state.buffer_policy)


def _py(call: Callable[..., Any], inputs: list[Any], types: Any) -> Any:
    """``call`` as an op of the graph that is being built."""
    return tf.py_function(call, inputs, types)


def _own_name(variable: Any) -> str:
    """A variable's name without its optimizer's, which Keras numbers anew for each optimizer of a process."""
    return str(variable.path).rpartition("/")[2]


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
    quorum: activation.Quorum = "solo",
    max_staleness: int = 16,
    grace: float = 0.0,
    seed: int = 0,
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
            place; do not use both.
        name: of the optimizer, as in Horovod.
        device_dense, device_sparse, compression, gradient_predivide_factor, op, backward_passes_per_step,
        average_aggregated_gradients, num_groups, groups, process_set, scale_local_gradients: as in
            ``horovod.tensorflow.keras.DistributedOptimizer``. In this version only the defaults are accepted.
        sparse_as_dense: send sparse gradients (embeddings) as dense tensors.
        quorum: who must be there for a round to start: "solo" (the first rank), "majority" (a rank drawn anew each
            round), "all" (synchronous SGD), a number of ranks, or a fraction of them.
        max_staleness: rounds a gradient may be late; 0 is synchronous.
        grace: seconds to wait for more ranks once the quorum is there.
        seed: of majority's draw, the same on all ranks.
        round_transform: called with the list of a round's average gradients, returns what to apply; for gradient
            clipping and the like: ``lambda grads: tf.clip_by_global_norm(grads, 1.0)[0]``. It is traced once.
        model: the model that is trained, so that ``drain()`` can make its batch-norm statistics agree.
        buffers: how: "average" them, keep each rank's own ("local"), or take rank 0's ("root").

    Returns:
        An instance of the wrapped optimizer's class with the methods of ``EagerMixin``.

    Raises:
        ValueError: an argument that cannot be; the message says what can.
        NotInitializedError: ``hvd.init()`` was not called.
    """
    check_eager_options(quorum, max_staleness, grace, buffers, LIFECYCLE.size())
    refuse(
        device_dense=(device_dense, ""),
        device_sparse=(device_sparse, ""),
        compression=(compression, hvd.Compression.none),
        gradient_predivide_factor=(gradient_predivide_factor, 1.0),
        op=(op, hvd.Average),
        backward_passes_per_step=(backward_passes_per_step, 1),
        average_aggregated_gradients=(average_aggregated_gradients, False),
        num_groups=(num_groups, 0),
        groups=(groups, None),
        process_set=(process_set, hvd.global_process_set),
        scale_local_gradients=(scale_local_gradients, True),
    )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(f"{type(optimizer).__name__} is no Keras 3 optimizer: pass one of keras.optimizers")
    if isinstance(optimizer, EagerMixin):
        raise ValueError("this optimizer is an EagerOptimizer already: wrap the plain one")
    wrapped_class = type(optimizer)
    # Saved models name the optimizer by module and class: they must load where this package is unknown.
    made: Any = type(
        wrapped_class.__name__,
        (EagerMixin, wrapped_class),
        {"_wrapped_class": wrapped_class, "__module__": wrapped_class.__module__},
    )
    wrapped: Any = object.__new__(made)
    wrapped.__dict__.update(optimizer.__dict__)
    if name is not None:
        wrapped.__dict__["name"] = name
    wrapped.__dict__["_eager"] = _Settings(
        config={"quorum": quorum, "max_staleness": max_staleness, "grace": float(grace), "seed": seed},
        sparse_as_dense=sparse_as_dense,
        round_transform=round_transform,
        model=model,
        buffers=buffers,
    )
    LIFECYCLE.add(wrapped)
    return wrapped


def DistributedOptimizer(optimizer: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N802  Horovod's name
    """``EagerOptimizer(quorum="all")``: synchronous SGD that is right on Keras 3, where Horovod's does not average."""
    warnings.warn(
        'on Keras 3 DistributedOptimizer is EagerOptimizer(quorum="all"): Horovod\'s own silently does not average',
        stacklevel=2,
    )
    return EagerOptimizer(optimizer, *args, quorum="all", **kwargs)
