"""Keras 3 on two workers, four ways: `horovodrun -np 2 --gloo python docs/examples/keras3/errors.py WAY`.

WAY is `callback` or `optimizer` (Horovod's own), `strategy` (MultiWorkerMirroredStrategy) or `hvd_async`. Each rank
says what it got: an error, or its weights after training, which are to be alike on all.
"""

import importlib
import json
import os
import sys

import numpy as np

RANK, WAY = int(os.environ.get("HOROVOD_RANK", "0")), sys.argv[1]
PORTS = os.environ.get("WORKERS_PORTS", "23455,23456").split(",")
"""At which the strategy's workers listen."""
if WAY == "strategy":  # before TensorFlow starts
    workers = [f"127.0.0.1:{port}" for port in PORTS]
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": RANK}})

import keras
import tensorflow as tf


def fit(optimizer, callbacks=(), **options):
    """Train on this rank's own samples; returns the weights."""
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile(optimizer=optimizer, loss="mse", **options)
    inputs = np.random.default_rng(RANK).normal(size=(64, 4)).astype("float32")
    model.fit(inputs, inputs.sum(axis=1, keepdims=True), batch_size=16, verbose=0, callbacks=list(callbacks))
    return model.layers[-1].kernel.numpy().ravel().tolist()


def train():
    """Train the way that was asked for."""
    if WAY == "strategy":
        with tf.distribute.MultiWorkerMirroredStrategy().scope():
            return fit(keras.optimizers.SGD(0.1))
    ours = WAY == "hvd_async"
    hvd = importlib.import_module("hvd_async.tensorflow.keras" if ours else "horovod.tensorflow.keras")
    hvd.init()
    broadcast = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)] if WAY != "optimizer" else []
    options = {"jit_compile": False} if ours else {}
    return fit(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), broadcast, **options)


keras.utils.set_random_seed(0)  # all ranks begin alike
try:
    print(f"rank {RANK}: {train()}", flush=True)
except (AttributeError, ValueError) as error:
    text = " ".join(str(error).split())
    print(f"rank {RANK}: {type(error).__name__}: {text[:80]} [...] {text[-110:]}", flush=True)
