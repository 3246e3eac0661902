"""A process that ends while a collective of TensorFlow is in flight."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import sys, threading
import tensorflow as tf
from hvd_async.tensorflow.collectives import _Threads
class Module:
    def __del__(self): print("the interpreter was finalized")
sys.modules["held"] = Module()
begun = threading.Event()
with tf.Graph().as_default() as graph:
    never = tf.queue.FIFOQueue(1, tf.float32).dequeue()
session = tf.compat.v1.Session(graph=graph)
threads = _Threads()
IN_FLIGHT and threads.run(lambda: (begun.set(), session.run(never))) and begun.wait(60)
threads.stop()
raise RuntimeError("boom")
"""


def run(in_flight: bool) -> tuple[int, str]:
    """Return the exit status of a process with or without an op in flight, and what it has printed."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("IN_FLIGHT", str(in_flight))],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout


def test_no_thread_returns_to_a_finalized_interpreter():
    """There it would abort the process, whose status then says nothing of the error."""
    assert run(in_flight=False) == (1, "the interpreter was finalized\n")
    assert run(in_flight=True) == (1, "")
