"""Ranks of a TensorFlow job: how a job's program begins and ends, and plain allreduce, the arm ``horovod``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

import hvd_async.tensorflow as hvd

from .rank import Job


def run(work: Callable[[Job], None]) -> None:
    """Run a job's program: ``work`` on this rank, between Horovod's start and its end."""
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    job = Job(hvd, lambda: hvd.allreduce(tf.zeros(1), name="bench.barrier"))
    work(job)
    job.finish()
    hvd.shutdown()


def averaged(gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return gradients averaged over the ranks by Horovod's plain allreduce.

    Horovod's own DistributedOptimizer does not average on Keras 3, so it cannot be compared with.
    """
    return [hvd.allreduce(g, name=f"bench.{i}", op=hvd.Average) for i, g in enumerate(gradients)]
