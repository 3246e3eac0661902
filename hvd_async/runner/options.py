"""The runners' command line as options that are checked against each other, with the defaults filled in."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_async.algorithms.gossip.config import GossipOptions
from hvd_async.algorithms.leader.config import LeaderOptions
from hvd_async.algorithms.option import either, flag, in_flags, options_of
from hvd_async.algorithms.registry import ALGORITHMS, OPTIONS

from .arguments import SYNCHRONOUS, build_parser, knowing, own_flags, owners
from .lr_schedule import Schedule
from .presets import DEFAULTS, PRESETS
from .stragglers import Injector, parse_inject

HOROVODS = ("none", "fp16")
"""How gradients may travel in Horovod's own allreduce."""
OPTIMIZERS_WITH = {"momentum": ("sgd", "lars"), "nesterov": ("sgd",), "weight_decay": ("sgd", "adamw", "lars")}


@dataclass(frozen=True)
class Options:
    """A run as the user asked for it, checked, defaults filled in. Times in seconds, lengths in epochs or steps.

    own: the options of the algorithm's family, as its optimizer takes them; None of Horovod's allreduce.
    lr, schedule: the rate of the whole job, or, before `at`, for `lr_images` images a step if that is set.
    precision: "fp32", "fp16" or "bf16". passes: backward passes of `batch_size` images in a step.
    """

    framework: str
    algorithm: str
    own: Any
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
    minutes: float | None
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
    monitor: int | None
    summary: Path | None
    progress: str
    eval_every: int
    seed: int
    threads: int | None

    @property
    def lockstep(self) -> bool:
        """Whether all ranks must do the same number of steps: plain allreduce hangs otherwise."""
        return self.own is None

    @property
    def gossips(self) -> bool:
        """Whether ranks have weights of their own, which they mix."""
        return isinstance(self.own, GossipOptions)

    @property
    def follows(self) -> bool:
        """Whether ranks have weights of their own, and are pulled towards a leader or a centre."""
        return isinstance(self.own, LeaderOptions)

    @property
    def apart(self) -> bool:
        """Whether ranks have weights of their own."""
        return self.gossips or self.follows

    @property
    def quorum(self) -> Any:
        """Who fires a round; None where there are none."""
        return getattr(self.own, "quorum", None)

    @property
    def weighted(self) -> bool:
        """Whether rounds are weighted by the images of each gradient."""
        return getattr(self.own, "weighting", None) == "samples"

    @property
    def by_rounds(self) -> bool:
        """Whether an epoch is so many rounds, and not so many steps of each rank."""
        return getattr(self.own, "pace", None) == "rounds"

    @property
    def init_settings(self) -> dict[str, Any]:
        """The keywords of `hvd.init`: leaders' groups need process sets, and it is not known yet who is in them.
        They are asked for only where there may be several groups: each of Horovod's cycles then costs more, idle ones
        too."""
        has_groups = "group" in ALGORITHMS[self.algorithm].options and not _all_or_single(self.own.group)
        return {"process_sets": "dynamic"} if has_groups else {}

    @property
    def settings(self) -> dict[str, Any]:
        """The keywords of the algorithm's optimizer that both frameworks have."""
        return {} if self.own is None else dict(vars(self.own))

    @property
    def step_images(self) -> int:
        """Images of one rank in a step: those of all its backward passes."""
        return self.batch_size * self.passes

    def at(self, size: int) -> Options:
        """The options of a job of `size` ranks: the learning rate is scaled if a preset asks for it.

        Raises ValueError, with a hint, where they do not fit such a job.
        """
        self.injector.check(size)
        if self.own is not None:
            self.own.check(size)
        if self.lr_images is None:
            return self
        rate = self.lr * self.step_images * size / self.lr_images
        return dataclasses.replace(
            self, lr=rate, lr_images=None, schedule=dataclasses.replace(self.schedule, base=rate)
        )


def _all_or_single(group: str | int | None) -> bool:
    """Whether a group is one rank, or all ranks of the job, by what Horovod's launcher has told every one of them."""
    size, of_host = os.environ.get("HOROVOD_SIZE"), os.environ.get("HOROVOD_LOCAL_SIZE")
    ranks = of_host if group in (None, "host") else str(group)
    return group == 1 or (size is not None and ranks == size)  # (a host of one rank may have neighbours of more)


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
    own = _take_own(values)
    _fill_recipe(values)
    _check_files(given)
    _check_minutes(given)
    is_folder = given.data not in ("digits", "synthetic")
    if given.data == "synthetic" and given.augment is not None:
        raise ValueError("--augment has nothing to vary in synthetic images: leave it out")
    if not is_folder and given.workers is not None:
        raise ValueError("--workers is for an image folder, --data DIR: leave it out")
    return Options(
        framework=framework,
        own=own,
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


def _take_own(values: dict[str, Any]) -> Any:
    """The options of the algorithm's family, taken from the flags' values; None of Horovod's allreduce.

    Flags that would do nothing, or that Horovod lacks, are refused.
    """
    algorithm = values["algorithm"]
    algorithms = _algorithms(values)
    given: dict[str, Any] = {}
    for name in own_flags():
        value, having = values.pop(name), owners(name)
        if value is None:
            continue
        if not set(having) & set(algorithms):
            raise ValueError(f"{flag(name)} only means something with --algorithm {either(having)}: leave it out")
        given[name] = value
    _check_compression(values["compression"], algorithm, algorithms)
    if algorithm in SYNCHRONOUS:
        return None
    family = OPTIONS[ALGORITHMS[algorithm].family]
    names = options_of(family)
    given |= {name: values[name] for name in ("algorithm", "seed") if name in names}
    own = family(**{name: value for name, value in given.items() if name in names})
    try:
        own.check(None)  # what depends on the job's size is checked in Options.at
    except ValueError as error:
        raise ValueError(in_flags(str(error), family)) from None
    return own


def _check_compression(compression: str, algorithm: str, algorithms: Iterable[str]) -> None:
    """Refuse what some algorithm of the run does not send."""
    own = HOROVODS if algorithm in SYNCHRONOUS else ALGORITHMS[algorithm].compressions
    others = [ALGORITHMS[one].compressions for one in algorithms if one not in SYNCHRONOUS]
    if all(compression in known for known in (own, *others)):
        return
    if len(own) == 1:
        raise ValueError(f"--compression: weights travel as they are with --algorithm {algorithm}: leave it out")
    if compression == "bf16":
        raise ValueError(
            "--compression bf16 is not Horovod's: take fp16, or --algorithm eager --quorum all, which is as synchronous"
        )
    raise ValueError(
        f"--compression {compression} is for {either(knowing(compression))}, which make up for its errors in later "
        f"messages: take fp16"
    )


def _algorithms(values: dict[str, Any]) -> list[str]:
    """All algorithms of the run; a --schedule that does not go with --algorithm is refused."""
    algorithm, switches = values["algorithm"], values["schedule"] or {}
    if switches and algorithm not in owners("schedule"):
        raise ValueError(
            f"--schedule only means something with --algorithm {either(owners('schedule'))}: leave it out, or take one "
            f"of these"
        )
    algorithms = [] if 0 in switches else [algorithm]
    algorithms += switches.values()
    if algorithm not in algorithms:
        raise ValueError(
            f"--schedule has {switches[0]} from epoch 0 on and never comes to --algorithm {algorithm}: make them agree"
        )
    return algorithms


def _fill_recipe(values: dict[str, Any]) -> None:
    """Fill in defaults where neither a flag nor the preset says anything; refuse flags that do not go together."""
    given = {name for name in DEFAULTS if values[name] is not None}
    preset = PRESETS.get(values.pop("preset") or "")
    values["lr_images"] = preset.lr_images if preset is not None and "lr" not in given else None
    for name, default in {**DEFAULTS, **(preset.values if preset is not None else {})}.items():
        values[name] = values[name] if name in given else default
    optimizer = values["optimizer"]
    for name, having in OPTIMIZERS_WITH.items():
        if optimizer not in having:
            if name in given:
                raise ValueError(
                    f"{flag(name)} does not go with --optimizer {optimizer}: leave it out, or take "
                    f"{' or '.join(having)}"
                )
            values[name] = type(DEFAULTS[name])(0)
    if values["nesterov"] and not values["momentum"]:
        raise ValueError("--nesterov needs a --momentum above 0: raise it, or say --no-nesterov")
    if values["cosine"] and "lr_decay_epochs" not in given:
        values["lr_decay_epochs"] = ()


def _check_files(given: argparse.Namespace) -> None:
    if given.monitor is not None and given.algorithm in SYNCHRONOUS:
        raise ValueError(
            f"--monitor shows what an optimizer of this library counts, and --algorithm {given.algorithm} has none: "
            f"take --algorithm eager --quorum all"
        )
    if given.resume and given.checkpoint_dir is None:
        raise ValueError("--resume needs --checkpoint-dir, the folder that holds the checkpoints")
    if given.data not in ("digits", "synthetic") and not Path(given.data).is_dir():
        raise ValueError(
            f"--data {given.data}: there is no such folder; say digits, synthetic, or a folder that holds "
            "train/ and val/"
        )


def _check_minutes(given: argparse.Namespace) -> None:
    if given.minutes is None:
        return
    if given.steps is not None:
        raise ValueError("--steps and --minutes both say when the run ends: take one of them")
    if given.resume:
        raise ValueError(
            "--resume goes on to --epochs or --steps, and not for so many --minutes: leave one of the two out"
        )
