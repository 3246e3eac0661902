"""A runner that gets a signal: ``signalled_runner.py torch|tf SIGNAL STEP,STEP,... FLAGS`` (a step a rank; 0: none)."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

framework, number = sys.argv.pop(1), signal.Signals[sys.argv.pop(1)]
steps = [int(step) for step in sys.argv.pop(1).split(",")]
sys.path.insert(0, str(Path(__file__).parents[3] / f"{framework}_models"))

import resnet50  # noqa: E402

NAME = {"torch": "TorchTrainer", "tf": "TensorFlowTrainer"}[framework]


class Signalled(getattr(resnet50, NAME)):  # type: ignore[misc]
    """Gets the signal in this rank's step."""

    taken = 0

    def train_step(self, *arguments: Any) -> float:
        """As the runner's."""
        self.taken += 1
        if self.taken == steps[resnet50.hvd.rank()]:
            os.kill(os.getpid(), number)
        return float(super().train_step(*arguments))


setattr(resnet50, NAME, Signalled)
resnet50.main()
