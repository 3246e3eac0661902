"""What the runners' command line yields: options that are checked against each other, with the defaults filled in."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..activation import Quorum, check_quorum
from .flags import build_parser
from .inject import Injector, parse_inject
from .presets import DEFAULTS, PRESETS
from .schedule import Schedule

EAGER_ONLY = {"quorum": "solo", "max_staleness": 16, "grace": 0.0, "pace": "steps"}
"""The flags that only `eager` knows, with their defaults."""
OPTIMIZERS_WITH = {"momentum": ("sgd", "lars"), "nesterov": ("sgd",), "weight_decay": ("sgd", "adamw", "lars")}


@dataclass(frozen=True)
class Options:
    """A run as the user asked for it, checked, defaults filled in. Times in seconds, lengths in epochs or steps.

    lr, schedule: the rate of the whole job, or, before `at`, for `lr_images` images a step if that is set.
    precision: "fp32", "fp16" or "bf16". passes: backward passes of `batch_size` images in a step.
    """

    framework: str
    algorithm: str
    quorum: Quorum | None
    max_staleness: int
    grace: float
    pace: str
    compression: str
    passes: int
    model: str
    bn_momentum: float
    data: str
    image_size: int
    augment: bool
    workers: int
    batch_size: int
    epochs: int
    steps: int | None
    optimizer: str
    lr: float
    lr_images: int | None
    momentum: float
    nesterov: bool
    weight_decay: float
    label_smoothing: float
    precision: str
    schedule: Schedule
    injector: Injector
    checkpoint_dir: Path | None
    resume: bool
    log_dir: Path | None
    summary: Path | None
    progress: str
    eval_every: int
    seed: int
    threads: int | None

    @property
    def lockstep(self) -> bool:
        """Whether all ranks must do the same number of steps: plain allreduce hangs otherwise."""
        return self.algorithm == "allreduce"

    @property
    def step_images(self) -> int:
        """Images of one rank in a step: those of all its backward passes."""
        return self.batch_size * self.passes

    def at(self, size: int) -> Options:
        """The options of a job of `size` ranks: the learning rate is scaled if a preset asks for it.

        Raises ValueError, with a hint, where they do not fit such a job.
        """
        self.injector.check(size)
        if self.quorum is not None:
            check_quorum(self.quorum, size)
        if self.lr_images is None:
            return self
        rate = self.lr * self.step_images * size / self.lr_images
        return dataclasses.replace(
            self, lr=rate, lr_images=None, schedule=dataclasses.replace(self.schedule, base=rate)
        )


def parse(framework: str, argv: Sequence[str] | None = None) -> Options:
    """Read the command line (`argv`, default the process's own) of the runner of `framework` ("torch", "tensorflow").

    Ends the process with a message on stderr and status 2 where an option is wrong, as argparse does.
    """
    parser = build_parser(framework)
    arguments = parser.parse_args(argv)
    try:
        return _options(framework, arguments)
    except ValueError as error:
        parser.error(str(error))


def _options(framework: str, given: argparse.Namespace) -> Options:
    values = vars(given)
    fp16, bf16 = values.pop("fp16"), values.pop("bf16")
    if fp16 and bf16:
        raise ValueError("--fp16 and --bf16 are two ways of mixed precision: take one")
    _fill_algorithm(values)
    _fill_recipe(values)
    _check_files(given)
    is_folder = given.data not in ("digits", "synthetic")
    if given.data == "synthetic" and given.augment is not None:
        raise ValueError("--augment has nothing to vary in synthetic images: leave it out")
    if not is_folder and given.workers is not None:
        raise ValueError("--workers is for an image folder, --data DIR: leave it out")
    return Options(
        framework=framework,
        passes=values.pop("backward_passes_per_step"),
        precision="fp16" if fp16 else "bf16" if bf16 else "fp32",
        schedule=Schedule(
            given.lr,
            given.epochs,
            values.pop("warmup_epochs"),
            values.pop("lr_decay_epochs"),
            cosine=values.pop("cosine"),
        ),
        injector=parse_inject(values.pop("inject"), given.seed),
        **{
            **values,
            "workers": given.workers or 4,
            "augment": given.data != "synthetic" if given.augment is None else given.augment,
            "image_size": given.image_size or (32 if given.data == "digits" else 224),
        },
    )


def _fill_algorithm(values: dict[str, Any]) -> None:
    """Defaults of the flags of the algorithm; those that would do nothing, or that Horovod lacks, are refused."""
    eager = values["algorithm"] == "eager"
    for name, default in EAGER_ONLY.items():
        if values[name] is None:
            values[name] = default
        elif not eager:
            raise ValueError(f"{_flag(name)} only means something with --algorithm eager: leave it out")
    if eager:
        check_quorum(values["quorum"], 1_000_000)  # a count is checked against the job's size in Options.at
        return
    values["quorum"] = None
    if values["compression"] == "bf16":
        raise ValueError(
            "--compression bf16 is not Horovod's: take fp16, or --algorithm eager --quorum all, which is as synchronous"
        )


def _fill_recipe(values: dict[str, Any]) -> None:
    """What neither a flag nor the preset says has its default; flags that do not go together are refused."""
    given = {name for name in DEFAULTS if values[name] is not None}
    preset = PRESETS.get(values.pop("preset") or "")
    values["lr_images"] = preset.lr_images if preset is not None and "lr" not in given else None
    for name, default in {**DEFAULTS, **(preset.values if preset is not None else {})}.items():
        values[name] = values[name] if name in given else default
    optimizer = values["optimizer"]
    for name, owners in OPTIMIZERS_WITH.items():
        if optimizer not in owners:
            if name in given:
                raise ValueError(
                    f"{_flag(name)} does not go with --optimizer {optimizer}: leave it out, or take "
                    f"{' or '.join(owners)}"
                )
            values[name] = type(DEFAULTS[name])(0)
    if values["nesterov"] and not values["momentum"]:
        raise ValueError("--nesterov needs a --momentum above 0: raise it, or say --no-nesterov")
    if values["cosine"] and "lr_decay_epochs" not in given:
        values["lr_decay_epochs"] = ()


def _check_files(given: argparse.Namespace) -> None:
    if given.resume and given.checkpoint_dir is None:
        raise ValueError("--resume needs --checkpoint-dir, the folder that holds the checkpoints")
    if given.data not in ("digits", "synthetic") and not Path(given.data).is_dir():
        raise ValueError(
            f"--data {given.data}: there is no such folder; say digits, synthetic, or a folder that holds "
            "train/ and val/"
        )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
