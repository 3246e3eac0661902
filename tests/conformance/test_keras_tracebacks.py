"""Keras: an error that ends a process inside a training step is told in a few lines."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import keras, numpy as np, tensorflow as tf
import hvd_async.tensorflow.keras as hvd
from hvd_async.testing import Cluster

def train(rank):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    opt = hvd.EagerOptimizer(keras.optimizers.SGD(0.1), nonfinite="raise")
    model.compile(optimizer=opt, loss="mse", jit_compile=False)
    model.fit(np.full((2, 2), np.nan), np.ones((2, 1)), verbose=0)

Cluster(1).run(train)
"""


def test_an_error_in_a_step_is_shown_with_the_users_own_lines() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    _, _, shown = done.stderr.partition("Traceback (most recent call last; libraries' lines are left out):\n")
    lines = shown.splitlines()
    assert lines[-1].startswith("FloatingPointError: NaN or infinity in this rank's gradients")
    assert any("in train" in line for line in lines)
    assert len(lines) < 20
