"""A runner that gets SIGUSR1 in mid-epoch: ``stopped_runner.py torch|tf STEP,STEP,...`` (one a rank) and its flags."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

framework, steps = sys.argv.pop(1), [int(step) for step in sys.argv.pop(1).split(",")]
sys.path.insert(0, str(Path(__file__).parents[3] / f"{framework}_models"))

import resnet50  # noqa: E402

if framework == "torch":
    import hvd_async.torch as hvd

    NAME = "TorchTrainer"
else:
    import hvd_async.tensorflow as hvd

    NAME = "TensorFlowTrainer"


class Signalled(getattr(resnet50, NAME)):  # type: ignore[misc]
    """Gets the signal in this rank's step."""

    taken = 0

    def train_step(self, *arguments: Any) -> float:
        """As the runner's."""
        self.taken += 1
        if self.taken == steps[hvd.rank()]:
            os.kill(os.getpid(), signal.SIGUSR1)
        return float(super().train_step(*arguments))


setattr(resnet50, NAME, Signalled)
resnet50.main()
