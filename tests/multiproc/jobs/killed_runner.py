"""The torch runner, whose last rank is killed in its step: ``killed_runner.py STEP`` and the flags of the runner."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "torch_models"))
last_step = int(sys.argv.pop(1))

import resnet50  # noqa: E402

import hvd_async.torch as hvd  # noqa: E402


class Killed(resnet50.TorchTrainer):
    """Does not come back from its step ``last_step``."""

    def train_step(self, *arguments: Any) -> float:
        """As the runner's, until then."""
        if self._steps + 1 == last_step and hvd.rank() == hvd.size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train_step(*arguments)


resnet50.TorchTrainer = Killed
resnet50.main()
