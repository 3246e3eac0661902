"""Gradients on their way from the training graph to the worker: a step is several ``give``s, then one ``take``.

A ``give`` never blocks, so a graph may have one for each bucket, as soon as backward has filled it, while its last op
alone waits in ``take``. (An op that waits holds one of TensorFlow's inter-op threads, of which there may be one.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from hvd_async.algorithms.eager.gradient_format import ReducedRound
from hvd_async.algorithms.eager.rank import EagerWorker
from hvd_async.runtime.log import warn
from hvd_async.runtime.protocol import Hyper
from hvd_async.tensorflow.bucket_layout import Layout


def is_finite(vector: tf.Tensor) -> bool:
    """Whether there is neither NaN nor an infinity in it."""
    array = np.asarray(vector)  # (no copy on the CPU)
    # NaN and infinities do not leave a scalar product, which takes half as long as looking at each element. Its own
    # overflow is not theirs.
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(np.dot(array, array)) or np.isfinite(array).all())


class _Sum(NamedTuple):
    """Gradients of several passes that were added up, and their samples."""

    vector: tf.Tensor | None
    samples: int


class Feed:
    """One rank's.

    Args:
        layout: of the buckets.
        passes: backward passes that make a step (Horovod's ``backward_passes_per_step``); those before the last are
            added up here.
        average: divide their sum by ``passes``.
        nonfinite: "skip" (a bucket with NaN or an infinity is handed over empty) or "raise".
    """

    def __init__(self, layout: Layout, passes: int, average: bool, nonfinite: str) -> None:
        self._layout, self._passes, self._raises = layout, passes, nonfinite == "raise"
        self._average = average
        self._sums: dict[int, _Sum] = {}
        """Gradients of the passes of this step so far."""
        self._given: dict[int, tf.Tensor | None] = {}
        """Gradients of this pass, not handed over yet."""
        self._spoilt: list[int] = []
        """Buckets of this pass that were not finite."""
        self.done = 0
        """Backward passes since the last step."""

    def continue_from(self, before: Feed) -> None:
        """Go on with the passes of a step that has begun among other ranks."""
        self.done = before.done
        for bucket, (vector, samples) in before._sums.items():
            own = None if vector is None else self._layout.relaid(bucket, vector, before._layout)
            self._sums[bucket] = _Sum(own, samples)

    def give(
        self, bucket: int, vector: tf.Tensor, worker: EagerWorker | None, scaled: bool, samples: int | None = None
    ) -> None:
        """Hand a bucket over, or keep it for ``take``: if a bucket must not leave before the others were looked at, or
        cannot.

        Args:
            bucket: its number.
            vector: its gradients, counted as one.
            worker: None before the ranks have met.
            scaled: whether the loss was scaled: then all buckets are handed over or none.
            samples: of the gradient; None where they do not count.
        """
        self.keep(bucket, vector, samples)
        last = self.done + 1 == self._passes
        if worker is not None and last and not scaled and not self._raises and bucket not in worker.gone:
            worker.hand_over(bucket, self._whole(bucket, self._given.pop(bucket), samples))

    def keep(self, bucket: int, vector: tf.Tensor, samples: int | None = None) -> None:
        """Keep a bucket for ``take``; arguments as of ``give``."""
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
        self, meet: Callable[[], EagerWorker], hyper: Hyper, scaled: bool, samples: int | None = None
    ) -> tuple[list[ReducedRound], bool]:
        """Hand over what is left, wait for the step's round.

        Args:
            meet: gives the worker; may wait for the other ranks.
            hyper: as for ``EagerWorker.step``.
            scaled, samples: as for ``give``.

        Returns:
            The rounds that wait to be applied (none unless this pass ends a step), each between the worker's ``begin``
            and ``end``, and whether all gradients of this pass were finite.

        Raises:
            FloatingPointError: they were not, and ``nonfinite="raise"``; nothing has been handed over.
        """
        given, self._given = self._given, {}
        spoilt, self._spoilt = self._spoilt, []
        if spoilt and self._raises and not scaled:
            raise FloatingPointError(
                f"NaN or infinity in this rank's gradients (bucket {spoilt[0]} of {len(self._layout)}); "
                f'nonfinite="skip" would leave them out and go on'
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
                f"a step was broken off when buckets {sorted(gone)} of its gradient had gone: this one brings the "
                f"others, and its own of these are left out"
            )
        left = [bucket for bucket in range(len(self._layout)) if bucket not in gone]
        vectors = {bucket: self._whole(bucket, self._of(given, bucket), samples) for bucket in left}
        self.done = 0
        return worker.finish_step(vectors, hyper), not spoilt

    def _of(self, given: Mapping[int, tf.Tensor | None], bucket: int) -> tf.Tensor | None:
        """Return what was given of a bucket; a gradient that is zero if nothing was."""
        return given[bucket] if bucket in given else self._layout.nothing(bucket)

    def _add(self, bucket: int, vector: tf.Tensor | None, samples: int | None) -> None:
        """Add this pass's gradient to those before it; None adds nothing."""
        if vector is None:
            return
        if samples is not None and self._average:  # by samples: sum_j n_j g_j
            vector = vector * tf.constant(float(samples), vector.dtype)
        before = self._sums.get(bucket, _Sum(None, 0))
        total = vector if before.vector is None else before.vector + vector
        self._sums[bucket] = _Sum(total, before.samples + (samples or 0))

    def _whole(self, bucket: int, vector: tf.Tensor | None, samples: int | None) -> tf.Tensor | None:
        """The step's gradient: this pass's, and those before it; x its samples where these count."""
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
