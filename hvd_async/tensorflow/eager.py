"""``EagerOptimizer`` for Keras 3 on TensorFlow: partial allreduce in ``fit()`` and in custom ``GradientTape`` loops.

In a graph, ``apply`` is: one py_function that hands the gradients over and waits for the step's round, then a loop that
fetches each waiting round and applies it with the wrapped optimizer. The same code runs eagerly.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from hvd_async import activation
from hvd_async.eager import EagerWorker, Round, Stats
from hvd_async.events import EagerConfig, Hyper
from hvd_async.lifecycle import local_engine
from hvd_async.options import check_eager_options, refuse
from hvd_async.tensorflow.buffers import (
    BufferPolicy,
    Layout,
    checksum,
    consensus_distance,
    raw,
    signature,
    unify_buffers,
)
from hvd_async.tensorflow.collectives import LIFECYCLE, world_size

RoundTransform = Callable[[list[tf.Tensor]], Sequence[tf.Tensor]]


class _Settings:
    """What the wrapper was given, and what it keeps between calls; one object, which Keras does not track."""

    def __init__(self, **options: Any) -> None:
        self.quorum: activation.Quorum = options["quorum"]
        self.max_staleness: int = options["max_staleness"]
        self.grace: float = options["grace"]
        self.seed: int = options["seed"]
        self.sparse_as_dense: bool = options["sparse_as_dense"]
        self.round_transform: RoundTransform | None = options["round_transform"]
        self.model: Any = options["model"]
        self.buffer_policy: str = options["buffers"]
        self.engine = local_engine()
        self.size = world_size()
        self.lock = threading.Lock()
        self.layout: Layout | None = None
        self.worker: EagerWorker | None = None
        self.fetched: deque[Round] = deque()
        """Rounds that the step's py_function has taken and the graph's loop has not applied yet."""
        self.momentum_correction = False
        self.last_lr: tf.Variable | None = None


class EagerMixin:
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
        gradients = self._indexed(list(grads), variables)
        own_lr = self._current_lr()
        fetched = tf.py_function(self._hand_over, [own_lr, *layout.flatten(gradients)], tf.int32)

        def one_round(done: tf.Tensor) -> tuple[tf.Tensor]:
            lr, *sums = tf.py_function(self._fetch, [done], [tf.float32, *layout.dtypes])
            self._apply_sums(sums, tf.reshape(lr, []))
            return (done + 1,)

        tf.while_loop(lambda done: done < tf.reshape(fetched, []), one_round, (tf.constant(0),), parallel_iterations=1)
        self._set_lr(own_lr)

    def _prepare(self: Any, variables: list[Any]) -> Layout:
        """Build the wrapped optimizer, once, outside of any graph."""
        state = self._eager
        if not self.built:
            with tf.init_scope():
                self.build(variables)
            self.built = True
        if state.layout is None:
            state.layout = Layout(self._trainable_variables)
        if state.momentum_correction and state.last_lr is None:
            with tf.init_scope():
                state.last_lr = tf.Variable(self._current_lr(), trainable=False)
        return state.layout

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
        hyper: Hyper = [{"learning_rate": float(lr)}]
        rounds = self._worker().step(vectors, hyper)
        self._eager.fetched.extend(round_ for round_ in rounds if round_.gradients)
        return np.int32(len(self._eager.fetched))

    def _fetch(self: Any, _: tf.Tensor) -> list[Any]:
        round_ = self._eager.fetched.popleft()
        return [np.float32(round_.hyper[0]["learning_rate"]), *round_.sums]

    def _apply_sums(self: Any, sums: Sequence[tf.Tensor], lr: tf.Tensor) -> None:
        """Apply one round: its average gradient, its learning rate."""
        state = self._eager
        gradients = state.layout.averages(sums, 1.0 / state.size)
        if state.round_transform is not None:
            gradients = list(state.round_transform(gradients))
        self._set_lr(lr)
        if state.last_lr is not None:
            self._correct_momentum(lr)
        self._wrapped_class.apply(self, gradients, self._trainable_variables)

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

    def drain(self: Any) -> int:
        """Say "I am done", apply what comes until every rank is done, and check that no gradient was lost.

        Afterwards every gradient is applied everywhere, the replicas are identical, and the batch-norm statistics of
        ``model`` agree by the ``buffers`` policy. A collective: every rank calls it equally often, also a rank that
        had no batch (its optimizer must be built). Not inside a ``tf.function``.

        Returns:
            The rank that was last to be done.

        Raises:
            GradientLossError: gradients produced and applied differ.
        """
        state = self._eager
        if not self.built and state.model is not None:
            self.build(state.model.trainable_variables)
        if not self.built:
            raise ValueError("drain() before the first step: call optimizer.build(model.trainable_variables) first")
        self._prepare(self._trainable_variables)
        own_lr = self._current_lr()

        def apply(round_: Round) -> None:
            if round_.gradients:
                self._apply_sums(round_.sums, tf.constant(round_.hyper[0]["learning_rate"], tf.float32))

        worker = self._worker()
        worker.drain(apply)
        self._set_lr(own_lr)
        if state.model is not None and state.buffer_policy != "local":
            unify_buffers(worker.engine, state.model.non_trainable_variables, state.buffer_policy)
        return worker.last_done

    def stats(self: Any) -> Stats:
        """What this rank's optimizer has done so far."""
        worker = self._eager.worker
        return Stats() if worker is None else worker.stats()

    @contextlib.contextmanager
    def consensus(self: Any) -> Iterator[None]:
        """In it the model holds the network's average (here: all are equal after a ``drain()``). A collective."""
        self.drain()
        yield

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

    def _worker(self: Any) -> EagerWorker:
        """This optimizer's worker; the first call, and the first after a shutdown(), meets the other ranks."""
        state = self._eager
        with state.lock:
            if state.worker is None or state.worker.engine.stopped:
                if not self.built:
                    raise ValueError("the optimizer is not built yet: take a step first, or call optimizer.build()")
                layout = self._prepare(self._trainable_variables)
                engine = state.engine or LIFECYCLE.engine()
                reference = weakref.ref(self)

                def finish() -> None:
                    optimizer = reference()
                    if optimizer is not None:
                        optimizer.drain()

                config = EagerConfig(state.quorum, state.max_staleness, state.grace, state.seed, len(layout.dtypes))
                state.worker = EagerWorker(engine, config, layout.zeros, finish)
                variables = self._trainable_variables
                state.worker.open([signature(v) for v in variables], [checksum(v) for v in variables])
        return state.worker


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
        optimizer: any Keras optimizer on the TensorFlow backend. It is not changed; what is returned shares its
            variables and takes its place.
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
            clipping and the like: ``lambda grads: tf.clip_by_global_norm(grads, 1.0)[0]``.
        model: the model that is trained, so that ``drain()`` can make its batch-norm statistics agree.
        buffers: how: "average" them, keep each rank's own ("local"), or take rank 0's ("root").

    Returns:
        An instance of the wrapped optimizer's class with the methods of ``EagerMixin``.

    Raises:
        ValueError: an argument that cannot be; the message says what can.
        NotInitializedError: ``hvd.init()`` was not called.
    """
    size = world_size()
    check_eager_options(quorum, max_staleness, grace, size)
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
    if buffers not in BufferPolicy:
        raise ValueError(f"buffers={buffers!r} is not known: take one of {', '.join(map(repr, BufferPolicy))}")
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
        quorum=quorum,
        max_staleness=max_staleness,
        grace=float(grace),
        seed=seed,
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
