"""Ranks with different numbers of threads: clipping in ``round_transform=`` must give the same bits on all of them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.conftest import LONG_RUN

SIZES = [(1,), (4096,), (300_000,), (1_000_003,), (700, 900), (64, 64, 7, 7)]
KERAS = """
import sys, numpy as np, tensorflow as tf
tf.config.threading.set_intra_op_parallelism_threads(int(sys.argv[1]))
import hvd_async.tensorflow as hvd
clip = tf.function(lambda grads: hvd.clip_by_global_norm(grads, 1.0))
norms = []
for seed in range(12):
    random = np.random.default_rng(seed)
    grads = [random.normal(size=size).astype("float32") for size in SIZES]
    clipped, norm = clip([tf.constant(one) for one in grads])
    right = np.sqrt(sum(np.square(one.astype("float64")).sum() for one in grads))
    assert abs(float(norm) / right - 1) < 1e-6, (float(norm), right)
    np.testing.assert_allclose(clipped[-1], grads[-1] / right, rtol=1e-5)
    norms.append(float(norm).hex())
small, norm = hvd.clip_by_global_norm([tf.constant([0.3, 0.4])], 1.0)
assert small[0].numpy().tolist() == np.float32([0.3, 0.4]).tolist()
assert np.isnan(hvd.clip_by_global_norm([tf.constant([np.inf, 0.4])], 1.0)[0][0].numpy()).all()
print(*norms)
"""


@pytest.mark.skipif(not LONG_RUN, reason="imports TensorFlow twice")
def test_clip_by_global_norm_of_this_library_in_tensorflow():
    reported = []
    for threads in ("1", "3"):
        run = subprocess.run(
            [sys.executable, "-c", KERAS.replace("SIZES", str(SIZES)), threads],
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert run.returncode == 0, run.stderr
        reported.append(run.stdout)
    assert reported[0] == reported[1]


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clip_grad_norm_of_torch_on_a_cpu(norm_type):
    """docs/eager_options.md says so of torch's own."""
    threads, clipped = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3, 8):
            torch.set_num_threads(count)
            generator = torch.Generator().manual_seed(0)
            parameters = [torch.nn.Parameter(torch.zeros(size)) for size in SIZES]
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0, norm_type)
            clipped.append((float(norm), [p.grad.numpy().tobytes() for p in parameters]))
    finally:
        torch.set_num_threads(threads)
    assert all(one == clipped[0] for one in clipped)
