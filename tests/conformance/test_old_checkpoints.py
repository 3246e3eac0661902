"""Checkpoints that versions 0.1.0 and 0.2.0 wrote load, and training continues from them as it would have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hvd_async.testing import Cluster
from tests.fixtures.checkpoints import KINDS, RANKS, REPEATABLE, SINCE_0_2_0, Keras, Torch, continue_training, path

FIXTURES = Path(__file__).parents[1] / "fixtures"
CHECKPOINTS = [*(("0_1_0", kind) for kind in KINDS if kind not in SINCE_0_2_0), *(("0_2_0", kind) for kind in KINDS)]


@pytest.mark.parametrize(("version", "kind"), CHECKPOINTS)
@pytest.mark.parametrize("make", [Torch, Keras])
def test_training_continues_from_an_old_checkpoint(make, version, kind):
    folder = FIXTURES / f"checkpoints_{version}"

    def train(rank: int) -> np.ndarray:
        trainer = make(kind)
        trainer.load(path(folder, trainer, kind, rank))
        return continue_training(trainer, rank)

    ends = Cluster(RANKS).run(train)
    assert np.array_equal(ends[0], ends[1])
    expected = np.load(folder / f"{make.__name__.lower()}-{kind}.npy")
    np.testing.assert_allclose(ends[0], expected, rtol=0, atol=1e-5 if kind in REPEATABLE else 1.0)
