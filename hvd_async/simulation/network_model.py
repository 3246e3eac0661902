"""Sizes of the network that ``network`` and ``scaling`` train, and of what they send. Pure."""

from __future__ import annotations

import itertools
import math

INPUTS, CLASSES = 64, 10
PAYLOAD = 0.956
"""Share of payload in TCP's packets on Ethernet: 1448 of 1514 bytes."""
BYTES = {"none": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 1.0 + 4 / 2048}
"""Bytes of an element in a message; int8 has a scale for every 2,048 elements."""


def widths(megabytes: float) -> tuple[int, ...]:
    """Return the widths of a classifier of digits whose weights, float32, have so many MB: two hidden layers' alike."""
    side = round(math.sqrt(megabytes * 1e6 / 4 + (INPUTS + CLASSES) ** 2 / 4) - (INPUTS + CLASSES) / 2)
    return (INPUTS, side, side, CLASSES)


def power_sgd_megabytes(megabytes: float) -> float:
    """Return what PowerSGD reduces in place of its gradients: of each matrix two of rank 1, if these have less than
    half as many elements, biases as they are."""
    elements = 0
    for into, out in itertools.pairwise(widths(megabytes)):
        factors = into + out
        elements += out + (factors if 2 * factors < into * out else into * out)
    return 4e-6 * elements
