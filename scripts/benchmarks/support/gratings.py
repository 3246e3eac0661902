"""Gratings in noise: images of ten orientations whose difficulty is known. No framework here.

An image has 8 x 8 pixels: a sinusoidal grating of one of ten orientations, shifted by one of sixteen phases that says
nothing of its class, in Gaussian noise of deviation 1. Since all that images are made of is known, so is the classifier
that no other can beat: the ideal observer, which takes the class with the greatest likelihood, summed over the phases.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from .digits import Indices

Images = NDArray[np.float32]
CLASSES, PHASES, SIDE = 10, 16, 8
FREQUENCY = 0.2
"""Periods a pixel."""
CONTRAST = 1.0
"""Amplitude, in deviations of the noise."""
TRAIN, TEST = 4096, 2000
"""Images."""
SEED = 11
OBSERVED = 50_000
"""Images by which the ideal observer's accuracy is known to 0.0007 (its standard error)."""


@functools.cache
def patterns() -> NDArray[np.float64]:
    """All gratings without noise, [classes, phases, pixels]."""
    y, x = np.mgrid[:SIDE, :SIDE] - (SIDE - 1) / 2
    angles = np.pi * np.arange(CLASSES)[:, None, None] / CLASSES
    waves = 2 * np.pi * FREQUENCY * (x * np.cos(angles) + y * np.sin(angles))
    phases = 2 * np.pi * np.arange(PHASES)[:, None, None] / PHASES
    found: NDArray[np.float64] = CONTRAST * np.cos(waves[:, None] + phases)
    return found.reshape(CLASSES, PHASES, SIDE * SIDE)


def draw(count: int, random: np.random.Generator) -> tuple[Images, Indices]:
    """So many images, [n, 8, 8], of classes and phases by chance, and their labels."""
    labels, phases = random.integers(CLASSES, size=count), random.integers(PHASES, size=count)
    pixels = patterns()[labels, phases] + random.standard_normal((count, SIDE * SIDE))
    return pixels.reshape(count, SIDE, SIDE).astype(np.float32), labels


def observe(pixels: Images) -> Indices:
    """The ideal observer's classes."""
    known = patterns().reshape(CLASSES * PHASES, -1)
    # log N(x; s, 1) less what all s have in common: x s - s s / 2
    likelihoods = pixels.reshape(len(pixels), -1) @ known.T - (known**2).sum(axis=1) / 2
    likelihoods = likelihoods.reshape(-1, CLASSES, PHASES)
    found: Indices = np.logaddexp.reduce(likelihoods, axis=2).argmax(axis=1)
    return found


@functools.cache
def best_accuracy() -> float:
    """The share of images that the ideal observer classifies correctly: no classifier is expected to do better."""
    pixels, labels = draw(OBSERVED, np.random.default_rng([SEED, 1]))
    return float((observe(pixels) == labels).mean())


@functools.cache
def images() -> tuple[Images, Indices]:
    """The images that all trainings share, and their labels: first those to train on, then those to test on."""
    return draw(TRAIN + TEST, np.random.default_rng([SEED, 0]))
