"""Training recipes: the defaults of the flags that make one up, and the published ones that `--preset` takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DEFAULTS: Mapping[str, Any] = {
    "batch_size": 16,
    "epochs": 16,
    "optimizer": "sgd",
    "lr": 0.05,
    "warmup_epochs": 0.0,
    "lr_decay_epochs": (),
    "momentum": 0.9,
    "nesterov": False,
    "weight_decay": 0.0,
}
"""Every flag that a preset may set, with its value where there is neither flag nor preset."""


@dataclass(frozen=True)
class Preset:
    """A recipe.

    values: of flags, by name, as in DEFAULTS. lr_images: the learning rate is for this many images a step of the whole
    job, and grows with them; None if it is not scaled.
    """

    values: Mapping[str, Any]
    lr_images: int | None
    text: str


_IMAGENET = {
    "batch_size": 128,
    "epochs": 90,
    "optimizer": "sgd",
    "lr": 0.1,
    "warmup_epochs": 5.0,
    "lr_decay_epochs": (30.0, 60.0, 80.0),
    "momentum": 0.9,
    "nesterov": False,
    "weight_decay": 1e-4,
}
PRESETS: Mapping[str, Preset] = {
    "eager-imagenet": Preset(
        _IMAGENET,
        256,
        "eager-SGD's (Li et al., 2020): --optimizer sgd --momentum 0.9 --weight-decay 0.0001 --batch-size 128 "
        "--epochs 90 --warmup-epochs 5 --lr-decay-epochs 30,60,80, and a learning rate of 0.1 per 256 images a step, "
        "so it grows with the number of ranks",
    ),
    "sgp-imagenet": Preset(
        {**_IMAGENET, "nesterov": True}, 256, "SGP's (Assran et al., 2019): the same and --nesterov"
    ),
    "lsgd-imagenet": Preset(
        {**_IMAGENET, "warmup_epochs": 0.0},
        None,
        "LSGD's (Teng et al., 2019): the same without warm-up, and --lr 0.1 at any number of ranks, as each rank takes "
        "its own steps",
    ),
}


def help_text() -> str:
    """Return what each preset sets, for --help."""
    return "; ".join(f"{name}: {preset.text}" for name, preset in PRESETS.items())
