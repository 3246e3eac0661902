"""The Keras replica under partial allreduce: buckets, gradients out, rounds in, and what all ranks have in common."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tensorflow as tf

from hvd_async.algorithms.eager.gradient_format import GradientFormat, ReducedRound
from hvd_async.algorithms.eager.rank import NAME, EagerWorker
from hvd_async.algorithms.option import confirms
from hvd_async.errors import ReplicaStateError
from hvd_async.optimizers import eager
from hvd_async.optimizers.agreement import Buffers
from hvd_async.optimizers.replica import warn_of_open_passes
from hvd_async.runtime.log import warn
from hvd_async.runtime.machine import STATE
from hvd_async.runtime.process_sets import RankGroup
from hvd_async.runtime.protocol import Hyper
from hvd_async.tensorflow.apply_round import Extrapolation, RoundTransform, Update, settings
from hvd_async.tensorflow.gradient_format import Codec, Compression, Layout, accumulated, partition
from hvd_async.tensorflow.variables import (
    buffers_of,
    build,
    checksum,
    constant,
    flat_double,
    frozen,
    is_finite,
    own_name,
    raw,
    refuse_overwritten,
    signature,
)

if TYPE_CHECKING:
    from hvd_async.tensorflow.factories import EagerArguments

# -- gradients between the training graph and the worker ---------------------------------------------------------------
# A step is several calls of ``give``, then one of ``take``. A ``give`` never blocks, so a graph may have one for each
# bucket, as soon as backward has filled it; only its last op waits, in ``take``. (An op that waits holds one of
# TensorFlow's inter-op threads, of which there may be only one.)


class _Sum(NamedTuple):
    """Sum of the gradients of several passes, and the number of their samples."""

    vector: tf.Tensor
    samples: int


class Feed:
    """Gradients of one rank between the training graph and the worker.

    Args:
        layout: of the buckets.
        given: the user's arguments. Gradients of backward passes before the last of a step are added up here.
    """

    def __init__(self, layout: Layout, given: EagerArguments) -> None:
        self._layout, self._passes, self._raises = layout, given.backward_passes_per_step, given.nonfinite == "raise"
        self._average = given.average_aggregated_gradients
        self._sums: dict[int, _Sum] = {}
        """Gradients of the passes of this step so far."""
        self._given: dict[int, tf.Tensor | None] = {}
        """Gradients of this pass that have not been handed over."""
        self._spoilt: list[int] = []
        """Buckets of this pass that were not finite."""
        self.done = 0
        """Backward passes since the last step."""

    def continue_from(self, before: Feed) -> None:
        """Take over the passes of a step that has begun before a membership change."""
        self.done = before.done
        for bucket, (vector, samples) in before._sums.items():
            self._sums[bucket] = _Sum(self._layout.relaid(bucket, vector, before._layout), samples)

    def give(self, bucket: int, vector: tf.Tensor, worker: EagerWorker | None, samples: int | None) -> None:
        """Hand a bucket over, or keep it for ``take`` if it cannot leave yet.

        Args:
            bucket: its number.
            vector: its gradients, counted as one.
            worker: None before the ranks have met.
            samples: of the gradient; None if rounds are not weighted.
        """
        self.keep(bucket, vector, samples)
        if worker is not None and self.done + 1 == self._passes and bucket not in worker.gone:
            worker.hand_over(bucket, self._whole(bucket, self._given.pop(bucket), samples))

    def keep(self, bucket: int, vector: tf.Tensor, samples: int | None) -> None:
        """Keep a bucket for ``take``; arguments as in ``give``."""
        if samples == 0:
            vector = self._layout.nothing(bucket)  # (the mean of nothing is NaN)
        if not vector.device.endswith("CPU:0"):
            with tf.device("CPU:0"):  # (once for all that read it: is_finite and the collectives)
                vector = tf.identity(vector)
        finite = is_finite(vector)
        if not finite:
            self._spoilt.append(bucket)
        self._given[bucket] = vector if finite else None

    def take(
        self, meet: Callable[[], EagerWorker], hyper: Hyper, scaled: bool, samples: int | None
    ) -> tuple[list[ReducedRound], bool]:
        """Hand over the remaining buckets, and wait for the step's round.

        Args:
            meet: returns the worker; may wait for the other ranks.
            hyper: as for ``EagerWorker.step``.
            scaled: whether the loss was scaled: then all buckets are handed over or none.
            samples: as for ``give``.

        Returns:
            The rounds that wait to be applied (none unless this pass ends a step), each between the worker's ``begin``
            and ``end``, and whether all gradients of this pass were finite.

        Raises:
            FloatingPointError: they were not, and ``nonfinite="raise"``; no gradient has been handed over.
        """
        given, self._given = self._given, {}
        spoilt, self._spoilt = self._spoilt, []
        if spoilt and self._raises and not scaled:
            raise FloatingPointError(
                f"NaN or infinity in this rank's gradients (bucket {spoilt[0]} of {len(self._layout)}); "
                f'nonfinite="skip" would leave them out and continue'
            )
        if spoilt and scaled:
            given = dict.fromkeys(range(len(self._layout)))
        if self.done + 1 < self._passes:
            self.done += 1
            for bucket in range(len(self._layout)):
                self._add(bucket, self._of(given, bucket), samples)
            return [], not spoilt
        worker = meet()
        gone = worker.gone
        if gone & given.keys():
            warn(
                f"a step was broken off when buckets {sorted(gone)} of its gradient had gone: this step hands over the "
                f"other buckets, and leaves its own gradients of these out"
            )
        left = [bucket for bucket in range(len(self._layout)) if bucket not in gone]
        vectors = {bucket: self._whole(bucket, self._of(given, bucket), samples) for bucket in left}
        self.done = 0
        return worker.finish_step(vectors, hyper), not spoilt

    def _of(self, given: Mapping[int, tf.Tensor | None], bucket: int) -> tf.Tensor | None:
        """Return the bucket's vector; a gradient that is zero if none was given."""
        return given[bucket] if bucket in given else self._layout.nothing(bucket)

    def _add(self, bucket: int, vector: tf.Tensor | None, samples: int | None) -> None:
        """Add this pass's gradient to those before it; None adds nothing."""
        if vector is None:
            return
        if samples is not None and self._average:  # by samples: sum_j n_j g_j
            vector = vector * tf.constant(float(samples), vector.dtype)
        count = samples or 0
        if bucket in self._sums:
            vector, count = self._sums[bucket].vector + vector, self._sums[bucket].samples + count
        self._sums[bucket] = _Sum(vector, count)

    def _whole(self, bucket: int, vector: tf.Tensor | None, samples: int | None) -> tf.Tensor | None:
        """Return the step's gradient: this pass's and those before it, times the samples if rounds are weighted."""
        if self._passes == 1 and samples is None:
            return vector
        self._add(bucket, vector, samples)
        total = self._sums.pop(bucket, None)
        if total is None:
            return None
        factor = 1.0 / self._passes if self._average else 1.0
        if samples is not None:
            factor = 1.0 if self._average else float(total.samples)
        return self._layout.recounted(bucket, total.vector, factor, total.samples)


# -- the replica -------------------------------------------------------------------------------------------------------


Array = np.ndarray[Any, Any]


class GradientReplica(eager.GradientReplica):
    """Variables, their buckets and the wrapped Keras optimizer that applies rounds; Keras does not track it.

    Args:
        rank_group: the ranks that share the optimizer.
        given: the user's arguments.
        scales: as in the attributes.
        groups: as in ``partition``.

    Attributes:
        scales: factors of a gradient when it is handed over, and of a round's sum when it is applied.
        devices: for dense and for sparse gradients.
        recorded: samples of the next gradient; None if they were not recorded.
        waiting: rounds that this step's loop has not reached.
        reached: the round that a step whose sums are in the graph has reached.
        put_back: ends the application of the round that the loop has reached: see ``Update.keep``.
    """

    def __init__(self, rank_group: RankGroup, given: EagerArguments, scales: tuple[float, float], groups: Any) -> None:
        self._rank_group, self._given, self.scales, self._groups = rank_group, given, scales, groups
        self.weighted = given.weighting == "samples"
        self.passes = given.backward_passes_per_step
        self.nonfinite = given.nonfinite
        self.devices = given.device_dense, given.device_sparse
        self.round_transform: RoundTransform | None = given.round_transform
        self.model = given.model
        self.recorded: int | None = None
        self.momentum_correction = False
        self._last_rate = tf.Variable(0.0, trainable=False)
        self.codec: Codec | None = None
        self.layout: Layout | None = None
        self.feed: Feed | None = None
        self._feed_before: Feed | None = None
        """The feed before a membership change, until there is a new one: it may hold passes of an open step."""
        self.update: Update | None = None
        self.waiting: deque[ReducedRound] = deque()
        self.reached: ReducedRound | None = None
        self.put_back: Callable[[], None] = lambda: None
        self.extrapolation: Extrapolation | None = None

    def continue_from(self, before: GradientReplica) -> None:
        self.momentum_correction, self._last_rate = before.momentum_correction, before._last_rate
        self.extrapolation = before.extrapolation
        self._feed_before = before.feed or before._feed_before

    # -- buckets ----------------------------------------------------------------------------------------------

    def prepare(self, variables: list[Any] | None = None) -> Layout:
        """Build the wrapped optimizer if necessary, and return the layout of its buckets; arguments as in ``build``."""
        optimizer = self.optimizer
        build(optimizer, self.model, variables)
        with tf.init_scope():
            if self.layout is None:
                self._lay_out(optimizer)
            assert self.layout is not None
            assert self.extrapolation is not None
            if self.update is None or self.update.stale():
                if self.extrapolation.wants_leads():
                    self.extrapolation.make_leads()
                self.update = Update(
                    optimizer,
                    self.layout,
                    self.round_transform,
                    lambda: self.momentum_correction,
                    self._last_rate,
                    self.extrapolation,
                )
        return self.layout

    def _lay_out(self, optimizer: Any) -> None:
        refuse_overwritten(optimizer, "averaged with late ones")
        variables = optimizer._trainable_variables
        given, group = self._given, self._rank_group
        buckets = partition([raw(v) for v in variables], given.bucket_cap_mb * 2**20, self._groups)
        dtypes = dict.fromkeys(accumulated(v) for v in variables)
        before, after = self.scales
        codec = Codec(given.compression, dtypes, group.size, given.max_staleness, after, group.index, self.weighted)
        factors = before, after / codec.scale
        self.codec, self.layout = codec, Layout(variables, buckets, factors, codec.tail, self.devices[0])
        self.feed = Feed(self.layout, given)
        if self._feed_before is not None:
            self.feed.continue_from(self._feed_before)
            self._feed_before = None
        config = optimizer._async.config_for(self.layout.nbytes)
        self.extrapolation = Extrapolation(optimizer, config.weight_prediction, self.extrapolation)

    @property
    def nbytes(self) -> tuple[int, ...]:
        return self.prepare().nbytes

    @property
    def dtypes(self) -> Sequence[tf.DType]:
        """Dtypes of the buckets' vectors, in which a checkpoint's pending gradients are restored."""
        return self.prepare().dtypes

    def gradient_format(self) -> GradientFormat:
        layout, codec, rank_group = self.prepare(), self.codec, self._rank_group
        assert codec is not None
        return GradientFormat(
            zeros=layout.zeros,
            nbytes=layout.nbytes,
            tail=codec.tail,
            encode=codec.encode,
            narrow=codec.narrow,
            decode=lambda vector, bucket: codec.decode(vector, layout.dtypes[bucket]),
            peek=lambda sums, count: np.asarray(sums)[-count:].tolist(),
            recount=lambda vector, count, elements: tf.concat(
                [vector[:-count], tf.constant(elements, vector.dtype)], 0
            ),
            sent=tuple(n * codec.nbytes(dtype) for n, dtype in zip(layout.elements, layout.dtypes, strict=True)),
            scale=codec.scale,
            process_set=rank_group.process_set,
            members=rank_group.members,
            process_set_id=rank_group.id,
        )

    def fingerprint(self) -> tuple[list[str], list[int]]:
        optimizer, layout, codec = self.optimizer, self.layout, self.codec
        assert layout is not None
        assert codec is not None
        own_rate = id(optimizer._learning_rate)
        held = [v for v in optimizer.variables if id(v) != own_rate]
        kinds = [f"optimizer {optimizer._wrapped_class.__name__}", *(f"setting {one}" for one in settings(optimizer))]
        kinds.append(f"buckets {[list(b.indices) for b in layout.buckets]}")
        wire = eager.wire_label(self._given.compression, (dtype.name for dtype in codec.wire.values()))
        kinds.append(
            f"gradients x {self.scales}, {self.passes} passes {self._given.average_aggregated_gradients}, as {wire}"
        )
        if optimizer.weight_decay is not None:
            kinds.append(f"decayed {[optimizer._use_weight_decay(v) for v in optimizer._trainable_variables]}")
        names = [*kinds, *(signature(v) for v in optimizer._trainable_variables)]
        names += [f"{STATE}{own_name(v)} {tuple(v.shape)}" for v in held]
        names += [f"{STATE}lead {place}" for place in range(len(self.leads))]
        every = [*optimizer._trainable_variables, *held, *self.leads]
        return names, [0] * len(kinds) + [checksum(v) for v in every]

    @property
    def leads(self) -> list[tf.Variable]:
        """State of the optimizer in addition to its own variables: see ``Extrapolation``."""
        return [] if self.extrapolation is None else self.extrapolation.leads

    def hyperparameters(self) -> Hyper:
        assert self.update is not None
        return [self.update.group(frozen(self.optimizer), [] if self.update.scheduled else [self.own_rate()])]

    def own_rate(self) -> tf.Tensor:
        """Return this rank's learning rate now."""
        return tf.cast(raw(self.optimizer._get_current_learning_rate()), tf.float32) + 0.0

    def read_double(self) -> Array:
        return flat_double(self.optimizer._trainable_variables)

    def buffers(self) -> Buffers:
        return buffers_of(self.model)

    def apply(self, round_: ReducedRound) -> None:
        update = self.update
        if round_.gradients:
            assert update is not None
            with tf.init_scope():
                put_back = update.keep(round_)
                update(*update.parts(round_))
                put_back()

    def finish(self, worker: EagerWorker, flush: bool) -> None:
        if flush and self.feed is not None:
            warn_of_open_passes(self.feed.done, self.passes)

    def record_samples(self, samples: int) -> None:
        self.recorded = samples

    def _samples(self) -> int | None:
        """Return the samples of the present gradient; None if rounds are not weighted.

        Raises:
            ReplicaStateError: they were not recorded.
        """
        if not self.weighted:
            return None
        if self.recorded is None:
            raise ReplicaStateError(
                "weighting='samples', and the samples of this gradient were not recorded: call "
                "optimizer.record_samples(len(batch)) before apply(). In fit() a callback of hvd.callbacks does it"
            )
        return self.recorded

    # -- the Python side of a step whose buckets the graph sums -------------------------------------------------

    def sums_in_graph(self) -> bool:
        """Return whether ops of a training graph sum the gradients, and register the optimizer if so, since its number
        is part of their names; if not, and outside a graph, the engine sums them.

        They do if each step has one round, which carries one gradient of each rank at most: under ``quorum="all"``.
        """
        given, driver = self._given, self.optimizer._async
        usual = (
            given.quorum == "all"
            and not (given.hierarchical or self.weighted)
            and self.passes == 1
            and self.nonfinite == "skip"
            and given.compression in (Compression.none, Compression.fp16, Compression.bf16)
            and all(one.vector is None for one in driver.restored or ())
            and not confirms()
        )
        if not usual or tf.executing_eagerly() or driver.lifecycle.elastic:
            return False
        with tf.init_scope():
            engine = driver.engine or driver.lifecycle.engine()
            if engine.elastic or not hasattr(engine.collectives, "sum_in_graph"):
                return False
            driver.register()
        return True

    def sums(self, vectors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the buckets' sums over the ranks, by ops of the graph that is being built."""
        codec, worker = self.codec, self.optimizer._async.worker
        assert codec is not None
        collectives, wire = worker.engine.collectives, worker.wire
        return [
            codec.decode(
                collectives.sum_in_graph(
                    codec.encode(vector), NAME.format(worker.number, bucket, 0), wire.process_set, wire.scale
                ),
                vector.dtype,
            )
            for bucket, vector in enumerate(vectors)
        ]

    def promise(self, number: int, frozen: list[int], update: Update, *rate: tf.Tensor) -> tf.Tensor:
        """Begin a step whose buckets the graph is about to sum.

        Args:
            number: number of the optimizer when the graph was made.
            frozen, update: as in ``step``.
            rate: this rank's learning rate, unless it follows a schedule.

        Returns:
            True for each bucket (bool, shape (buckets,)).

        Raises:
            ReplicaStateError: the optimizer has another number by now.
        """
        self.check_attached()
        self.optimizer._async.check_outside_consensus("apply()")
        worker = self.optimizer._async.worker_now()
        if worker.number != number:
            raise ReplicaStateError(
                f"the ranks have registered this optimizer again, as number {worker.number}, since the graph of this "
                f"step was made for number {number}: make a new tf.function, or call model.compile() before fit()"
            )
        worker.promise([update.group(frozen, rate)])
        return constant((True,) * len(self.dtypes), tf.bool)

    def fulfil(self, update: Update, given: tf.Tensor, tails: tf.Tensor, waited: tf.Tensor) -> list[tf.Tensor]:
        """Wait until the round of the promised step has started, and begin to apply it.

        Args:
            update: applies rounds.
            given: for each bucket, whether this rank had a gradient (bool, shape (buckets,)).
            tails: the last elements of each sum, shape (buckets, tail).
            waited: seconds for which the graph has waited for the sums (float64, shape ()).

        Returns:
            Whether there is something to apply, and whether to all variables (bool, shape (2,)); then the round's
            learning rate, unless it follows a schedule.
        """
        worker = self.optimizer._async.worker
        round_ = worker.fulfil(tails.numpy().tolist(), given.numpy().tolist(), float(waited))
        self.reached, self.put_back = round_, lambda: None
        if not round_.gradients:
            self.end()
            return [constant((False, True), tf.bool), *update.nothing[: -len(self.dtypes)]]
        self.put_back = update.keep(round_)
        return [constant((True, not update.unmoved(round_)), tf.bool), *update.rate(round_)]

    def without_unmoved(self, update: Update, *sums: tf.Tensor) -> list[tf.Tensor]:
        """Return the sums of the round that the step has reached, with zeros for variables that it must not move."""
        assert self.layout is not None
        assert self.reached is not None
        return self.layout.without(update.unmoved(self.reached), sums)

    def end(self, _: Any = None) -> None:
        """End the application of the round that the step has reached."""
        self.put_back()
        self.optimizer._async.worker.end()

    # -- the Python side of any other step ----------------------------------------------------------------------

    def give(self, bucket: int, vector: tf.Tensor) -> None:
        """Hand a bucket's gradients over before the others are checked."""
        self.check_attached()
        self.optimizer._async.check_outside_consensus("apply()")
        assert self.feed is not None
        self.feed.give(bucket, vector, self.optimizer._async.met, self._samples())

    def step(
        self, scaled: bool, frozen: list[int], update: Update, buckets: Sequence[int], *inputs: tf.Tensor
    ) -> list[tf.Tensor]:
        """Hand over the remaining gradients of this step, wait for its round, and begin to apply it.

        Args:
            scaled: whether the loss was scaled.
            frozen: indices of the variables that a round led by this rank must not move.
            update: applies rounds.
            buckets: numbers of the remaining buckets.
            inputs: their vectors, then this rank's learning rate unless it follows a schedule.

        Returns:
            Whether this rank's gradients were finite (bool, shape ()); then as ``end_round``.
        """
        self.check_attached()
        self.optimizer._async.check_outside_consensus("apply()")
        assert self.feed is not None
        group = update.group(frozen, [] if update.scheduled else [inputs[-1]])
        samples = self._samples()
        try:
            for bucket, vector in zip(buckets, inputs, strict=False):
                self.feed.keep(bucket, vector, samples)
            rounds, finite = self.feed.take(self.optimizer._async.worker_now, [group], scaled, samples)
        finally:
            self.recorded = None
        self.waiting = deque(rounds)
        return [constant(finite, tf.bool), *self._next(update)]

    def end_round(self, update: Update, _: Any = None) -> list[tf.Tensor]:
        """End the application of a round, and begin with the next one of this step.

        Returns:
            Whether there is one (bool, shape ()), and it, as ``update`` takes it; empty vectors if there is none.
        """
        self.end()
        return self._next(update)

    def _next(self, update: Update) -> list[tf.Tensor]:
        while self.waiting and not self.waiting[0].gradients:  # (it is empty)
            with self.optimizer._async.worker.applying(self.waiting.popleft()):
                pass
        if not self.waiting:
            return [constant(False, tf.bool), *update.nothing]
        round_ = self.waiting.popleft()
        self.optimizer._async.worker.begin(round_)
        self.put_back = update.keep(round_)
        return [constant(True, tf.bool), *update.parts(round_)]
