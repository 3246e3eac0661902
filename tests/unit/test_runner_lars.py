"""LARS of both frameworks against a reference in float64 NumPy, with the runners' groups: kernels, and the rest."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
SHAPES = ((4, 3), (3,), (3, 2), (2, 2), (3, 3, 2, 4))
STEPS = 5
MOMENTUM, DECAY, TRUST = 0.9, 0.01, 0.001


def load(framework):
    """The module of this name, of which there are two."""
    spec = importlib.util.spec_from_file_location(f"{framework}_lars", ROOT / f"{framework}_models" / "lars.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def start():
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal(shape) for shape in SHAPES]
    weights[2][:] = 0.0  # |w| = 0: a layer that begins at nothing must move all the same
    return weights


def gradients(step):
    rng = np.random.default_rng([1, step])
    found = [rng.standard_normal(shape) for shape in SHAPES]
    if step == 2:
        found[3][:] = 0.0  # |g| = 0
    return found


def rate(step):
    return 2.0 / (1 + step)


def reference():
    """You et al., 2017, algorithm 1; one-dimensional parameters by plain momentum without decay."""
    weights = start()
    velocities = [np.zeros_like(w) for w in weights]
    for step in range(STEPS):
        for w, v, g in zip(weights, velocities, gradients(step), strict=True):
            adapts = w.ndim > 1
            decay = DECAY if adapts else 0.0
            norm, size = np.linalg.norm(w), np.linalg.norm(g)
            local = TRUST * norm / (size + decay * norm) if adapts and norm > 0 and size > 0 else 1.0
            v[:] = MOMENTUM * v + rate(step) * local * (g + decay * w)
            w -= v
    return weights


def by_torch():
    import torch

    parameters = [torch.nn.Parameter(torch.tensor(w)) for w in start()]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.ndim <= 1], "adapt": False},
    ]
    optimizer = load("torch").LARS(groups, lr=1.0, momentum=MOMENTUM, trust=TRUST)
    for step in range(STEPS):
        for p, g in zip(parameters, gradients(step), strict=True):
            p.grad = torch.tensor(g)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        for p, g in zip(parameters, gradients(step), strict=True):
            assert torch.equal(p.grad, torch.tensor(g)), "changed a gradient"
    return [p.detach().numpy() for p in parameters]


def by_keras():
    """In every second step compiled."""
    import keras
    import tensorflow as tf

    variables = [keras.Variable(w, dtype="float32") for w in start()]
    optimizer = load("tf").LARS(1.0, momentum=MOMENTUM, decay=DECAY, trust=TRUST)
    optimizer.build(variables)
    compiled = tf.function(lambda *found: optimizer.apply(list(found), variables))
    for step in range(STEPS):
        optimizer.learning_rate.assign(rate(step))
        found = [tf.constant(g, tf.float32) for g in gradients(step)]
        compiled(*found) if step % 2 else optimizer.apply(found, variables)
    return [variable.numpy() for variable in variables]


@pytest.mark.parametrize(("train", "tolerance"), [(by_torch, 1e-12), (by_keras, 1e-5)])
def test_lars(train, tolerance):
    for found, expected in zip(train(), reference(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
