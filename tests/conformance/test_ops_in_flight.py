"""A process that ends on an error while a collective of TensorFlow is in flight."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import sys, threading
import tensorflow as tf
from hvd_async.tensorflow.collectives import _Threads
class Module:
    def __del__(self): print("the interpreter is finalized, which aborts threads that return to it from C++")
sys.modules["held"] = Module()
with tf.Graph().as_default() as graph:
    never = tf.queue.FIFOQueue(1, tf.float32).dequeue()
session, begun, threads = tf.compat.v1.Session(graph=graph), threading.Event(), _Threads()
threads.run(lambda: (begun.set(), session.run(never)))
begun.wait(60)
threads.stop()
raise RuntimeError("boom")
"""


def test_the_process_keeps_its_status():
    """A thread that returned from TensorFlow to a finalized interpreter aborted it: status -6."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
