"""The LSTM that clips are classified by, for torch."""

from __future__ import annotations

import torch

from ...support.clips import CLASSES, PIXELS
from .recurrent import HIDDEN


class Classifier(torch.nn.Module):
    """An LSTM, and a linear layer on its output at a clip's last frame."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(PIXELS, HIDDEN, batch_first=True)
        self.out = torch.nn.Linear(HIDDEN, CLASSES)

    def forward(self, frames: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Logits, [clips, classes]."""
        outputs, _ = self.lstm(frames)
        logits: torch.Tensor = self.out(outputs[torch.arange(len(lengths)), lengths - 1])
        return logits
