"""The runner's models in Keras."""

from __future__ import annotations

from typing import Any

import keras


def build(name: str, classes: int, image_size: int, bn_momentum: float) -> Any:
    """A model from [n, image_size, image_size, 3] images to [n, classes] logits, randomly initialised.

    Args:
        name: "resnet50" (``keras.applications``'), or "small": two convolutions with batch norm.
        classes: the number of outputs.
        image_size: pixels; ResNet-50 wants at least 32.
        bn_momentum: share of its old value that a running average keeps each step.
    """
    shape = (image_size, image_size, 3)
    if name == "small":
        model = small(classes, shape)
    else:
        model = keras.applications.ResNet50(
            weights=None, classes=classes, input_shape=shape, classifier_activation=None
        )
    for layer in model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.momentum = bn_momentum
    return model


def small(classes: int, shape: tuple[int, int, int]) -> Any:
    """Two strided convolutions with batch norm and a linear layer on the mean: for quick tries."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input(shape),
            *(layers.Conv2D(16, 5, strides=2, padding="same", use_bias=False), layers.BatchNormalization()),
            layers.ReLU(),
            *(layers.Conv2D(32, 3, strides=2, padding="same", use_bias=False), layers.BatchNormalization()),
            layers.ReLU(),
            *(layers.AveragePooling2D(max(1, shape[0] // 8)), layers.Flatten(), layers.Dense(classes)),
        ]
    )
