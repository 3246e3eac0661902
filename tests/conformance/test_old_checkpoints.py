"""Checkpoints that version 0.1.0 wrote load, and training continues from them as it would have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hvd_async.testing import Cluster
from tests.fixtures.checkpoints import KINDS, RANKS, REPEATABLE, Keras, Torch, continue_training, path

FOLDER = Path(__file__).parents[1] / "fixtures" / "checkpoints_0_1_0"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [Torch, Keras])
def test_training_continues_from_an_old_checkpoint(make, kind):
    def train(rank: int) -> np.ndarray:
        trainer = make(kind)
        trainer.load(path(FOLDER, trainer, kind, rank))
        return continue_training(trainer, rank)

    ends = Cluster(RANKS).run(train)
    assert np.array_equal(ends[0], ends[1])
    expected = np.load(FOLDER / f"{make.__name__.lower()}-{kind}.npy")
    np.testing.assert_allclose(ends[0], expected, rtol=0, atol=1e-5 if kind in REPEATABLE else 1.0)
