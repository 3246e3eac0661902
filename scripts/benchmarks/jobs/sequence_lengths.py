"""The torch job of ``sequence_lengths``: an LSTM on clips of different lengths."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from ..support.arms import eager
from ..support.clips import Batch
from .shared.arm import Arm
from .shared.clip_model import Classifier
from .shared.rank import Block, Job
from .shared.recurrent import training_of


class TorchLearner:
    """A ``Learner`` of torch."""

    def __init__(self, job: Job, block: Block) -> None:
        torch.manual_seed(block["seed"])
        self._model = Classifier()
        optimizer = torch.optim.SGD(self._model.parameters(), lr=block["lr"], momentum=block["momentum"])
        own = {"seed": block["seed"]} if eager(block["arm"]) else {}
        self._arm = Arm(block["arm"], self._model, job, optimizer, **own)
        self.stats, self.drain = self._arm.stats, self._arm.drain
        self.identical, self.close = self._arm.identical, self._arm.close

    def step(self, batch: Batch, rate: float, computed: Callable[[], None]) -> None:
        """Take a step.

        An arm hands gradients over during the backward pass. So that they leave when the computation has ended, they
        are computed beforehand, and the backward pass is that of a linear function with just these gradients.
        """
        for group in self._arm.optimizer.param_groups:
            group["lr"] = rate

        def loss(model: torch.nn.Module) -> torch.Tensor:
            parameters = list(model.parameters())
            logits = model(torch.from_numpy(batch.frames), torch.from_numpy(batch.lengths))
            value = torch.nn.functional.cross_entropy(logits, torch.from_numpy(batch.labels))
            gradients = torch.autograd.grad(value, parameters)
            computed()
            return torch.stack([(p * g).sum() for p, g in zip(parameters, gradients, strict=True)]).sum()

        self._arm.train(loss)

    @torch.no_grad()
    def classify(self, batch: Batch) -> NDArray[np.int64]:
        """Return the clips' classes."""
        logits = self._model(torch.from_numpy(batch.frames), torch.from_numpy(batch.lengths))
        found: NDArray[np.int64] = logits.argmax(dim=1).numpy()
        return found


run_block = training_of(TorchLearner)
