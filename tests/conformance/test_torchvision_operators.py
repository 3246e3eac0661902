"""torch: torchvision, and what imports it, next to a torch that it was not built for."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

SCRIPT = """
import hvd_async.torch as hvd
declared = hvd.declare_torchvision_operators()
import torchvision, torch
boxes, scores = torch.tensor([[0.0, 0.0, 1.0, 1.0]] * 2), torch.ones(2)
try:
    found = torchvision.ops.nms(boxes, scores, 0.5).tolist()
except (NotImplementedError, RuntimeError):
    found = "no operator"
classes = torchvision.models.resnet18(num_classes=3)(torch.zeros(2, 3, 32, 32)).shape[1]
print(declared, hvd.declare_torchvision_operators(), found, classes)
"""


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed")
def test_torchvision_can_be_imported_and_says_what_it_cannot_do():
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=False)
    assert run.stdout.strip() in ("True False no operator 3", "False False [0] 3"), run.stderr
