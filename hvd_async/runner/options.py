"""The runners' command line as options that are checked against each other, with the defaults filled in."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_async.algorithms.eager.quorum import Quorum, check_quorum

from .arguments import GOSSIP, LEADER, build_parser
from .lr_schedule import Schedule
from .presets import DEFAULTS, PRESETS
from .stragglers import Injector, parse_inject

EAGER = ("eager",)
MIXED = ("sgp", "osgp", "dpsgd")
"""The algorithms with a mixing matrix."""
LSGD = ("local_period", "local_pull", "global_pull", "local_prox", "global_prox", "group", "loss_window")
"""Options of LSGD alone."""
OWNED: Mapping[str, tuple[Any, Mapping[str, Any]]] = {
    "quorum": (None, dict.fromkeys(EAGER, "solo")),
    "max_staleness": (None, {"eager": 16, "osgp": None}),
    "grace": (0.0, dict.fromkeys(EAGER, 0.0)),
    "pace": ("steps", dict.fromkeys(EAGER, "steps")),
    "topology": (None, dict.fromkeys(GOSSIP)),
    "peers": (1, dict.fromkeys(GOSSIP, 1)),
    "mixing": ("uniform", dict.fromkeys(MIXED, "uniform")),
    "hierarchical": (False, dict.fromkeys(MIXED, False)),
    "average_every": (0, dict.fromkeys(MIXED, 0)),
    "max_local_steps": (4, {"adpsgd": 4}),
    "global_period": (None, dict.fromkeys(LEADER)),
    "lr_spread": ("none", dict.fromkeys(LEADER, "none")),
    **{name: (None, {"lsgd": None}) for name in LSGD},
    **{name: (None, {"easgd": None}) for name in ("alpha", "beta")},
}
"""Flags that not all algorithms know: the value for those that do not, and the defaults of those that do."""
OPTIMIZERS_WITH = {"momentum": ("sgd", "lars"), "nesterov": ("sgd",), "weight_decay": ("sgd", "adamw", "lars")}


@dataclass(frozen=True)
class Options:
    """A run as the user asked for it, checked, defaults filled in. Times in seconds, lengths in epochs or steps.

    lr, schedule: the rate of the whole job, or, before `at`, for `lr_images` images a step if that is set.
    precision: "fp32", "fp16" or "bf16". passes: backward passes of `batch_size` images in a step.
    switches: the algorithms of later epochs, by the epoch from which on they hold. topology, max_staleness, and all
    from local_period to loss_window: None is the optimizer's own default.
    """

    framework: str
    algorithm: str
    quorum: Quorum | None
    max_staleness: int | None
    grace: float
    pace: str
    compression: str
    topology: str | None
    peers: int | Mapping[int, int]
    mixing: str
    hierarchical: bool
    average_every: int
    max_local_steps: int
    switches: Mapping[int, str]
    local_period: int | None
    global_period: int | None
    local_pull: float | None
    global_pull: float | None
    local_prox: float | None
    global_prox: float | None
    alpha: float | None
    beta: float | None
    group: str | int | None
    loss_window: int | None
    lr_spread: str
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
    def gossips(self) -> bool:
        """Whether ranks have weights of their own, which they mix."""
        return self.algorithm in GOSSIP

    @property
    def follows(self) -> bool:
        """Whether ranks have weights of their own, and are pulled towards a leader or a centre."""
        return self.algorithm in LEADER

    @property
    def apart(self) -> bool:
        """Whether ranks have weights of their own."""
        return self.gossips or self.follows

    @property
    def init_settings(self) -> dict[str, Any]:
        """The keywords of `hvd.init`: a leader's group needs a process set, and it is not known yet who is in it."""
        return {"process_sets": "dynamic"} if self.algorithm == "lsgd" else {}

    @property
    def leader_settings(self) -> dict[str, Any]:
        """The keywords of `LeaderOptimizer` that both frameworks have."""
        names = ("algorithm", "global_period", "alpha", "beta", "lr_spread", *LSGD)
        return {name: getattr(self, name) for name in names}

    @property
    def gossip_settings(self) -> dict[str, Any]:
        """The keywords of `GossipOptimizer` that both frameworks have."""
        names = ("algorithm", "topology", "peers", "mixing", "max_staleness", "hierarchical", "max_local_steps")
        keywords = {name: getattr(self, name) for name in (*names, "average_every")}
        return {**keywords, "schedule": self.switches or None}

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
    _check_minutes(given)
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
    algorithm = values["algorithm"]
    algorithms = _algorithms(values)
    for name, (neutral, owners) in OWNED.items():
        owner = next((one for one in algorithms if one in owners), None)
        if values[name] is None:
            values[name] = neutral if owner is None else owners[owner]
        elif owner is None:
            raise ValueError(f"{_flag(name)} only means something with --algorithm {_either(owners)}: leave it out")
    if algorithm == "eager":
        check_quorum(values["quorum"], None)  # a count is checked against the job's size in Options.at
    if values["compression"] != "none" and algorithm in LEADER:
        raise ValueError(f"--compression: weights travel as they are with --algorithm {algorithm}: leave it out")
    if values["local_period"] and values["local_period"] > (values["global_period"] or 16):
        raise ValueError(
            f"--local-period {values['local_period']} is above --global-period {values['global_period'] or 16}: groups "
            f"follow their own leader more often than that of all"
        )
    if values["compression"] == "int8" and (algorithm not in GOSSIP or "adpsgd" in algorithms):
        raise ValueError(
            f"--compression int8 is for {_either(MIXED)}, which make up for its errors in later messages: take fp16"
        )
    if values["compression"] == "bf16" and algorithm == "allreduce":
        raise ValueError(
            "--compression bf16 is not Horovod's: take fp16, or --algorithm eager --quorum all, which is as synchronous"
        )


def _algorithms(values: dict[str, Any]) -> list[str]:
    """All algorithms of the run; a --schedule that does not go with --algorithm is refused."""
    algorithm = values["algorithm"]
    switches = values["switches"] = values["switches"] or {}
    if switches and algorithm not in GOSSIP:
        raise ValueError(
            f"--schedule only means something with --algorithm {_either(GOSSIP)}: leave it out, or take one of these"
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


def _check_minutes(given: argparse.Namespace) -> None:
    if given.minutes is None:
        return
    if given.steps is not None:
        raise ValueError("--steps and --minutes both say when the run ends: take one of them")
    if given.resume:
        raise ValueError(
            "--resume goes on to --epochs or --steps, and not for so many --minutes: leave one of the two out"
        )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _either(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last
