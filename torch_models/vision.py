"""The runner's models: torchvision's ResNet-50, also beside a torch without CUDA, and a small one."""

from __future__ import annotations

import functools

import torch


def build(name: str, classes: int, bn_momentum: float) -> torch.nn.Module:
    """A model from [n, 3, h, w] images to [n, classes] logits, randomly initialised.

    Args:
        name: "resnet50", or "small": two convolutions with batch norm.
        classes: the number of outputs.
        bn_momentum: share of its old value that a running average keeps each step (torch's momentum is 1 minus this).
    """
    model: torch.nn.Module = small(classes) if name == "small" else resnet50(classes)
    for layer in model.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.momentum = 1 - bn_momentum
    return model


def resnet50(classes: int) -> torch.nn.Module:
    """torchvision's, which takes seconds to import: the small model goes without."""
    if torch.version.cuda is None:
        _declare_operators()
    from torchvision import models

    model: torch.nn.Module = models.resnet50(num_classes=classes)
    return model


@functools.cache
def _declare_operators() -> torch.library.Library:
    """torchvision's wheel wants CUDA's libraries for its compiled operators and fails at import without them. Their
    schemas are enough for its models, which do not call these operators. What is returned must stay alive."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def small(classes: int) -> torch.nn.Module:
    """Two strided convolutions with batch norm and a linear layer on the mean: for quick tries."""
    nn = torch.nn
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 5, stride=2, padding=2, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, classes)),
    )
