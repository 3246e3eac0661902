"""Command line of both training scripts: flags as fields of dataclasses, presets, and checks across flags.

The flags of an algorithm's options are generated from its family's dataclass.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hvd_async.algorithms.gossip.config import GossipOptions
from hvd_async.algorithms.leader.config import LeaderOptions
from hvd_async.algorithms.option import Option, Real, Whole, either, flag, in_flags, option, options_of
from hvd_async.algorithms.registry import ALGORITHMS, OPTIONS
from hvd_async.runtime import launch

from .course import FORMS, Injector, Schedule

EMBEDDED = ("digits", "synthetic")
"""Values of --data that do not name a folder."""
SYNCHRONOUS = tuple(name for name, one in ALGORITHMS.items() if one.waits_for == "all")
"""Horovod's allreduce, which needs no wrapper; gossip can switch to it, and then averages all weights."""
OWN = tuple(name for name in ALGORITHMS if name not in SYNCHRONOUS)


def members(family: str) -> tuple[str, ...]:
    """Return the algorithms of a family that --algorithm accepts, without Horovod's."""
    return tuple(name for name in OWN if ALGORITHMS[name].family == family)


def owners(name: str) -> tuple[str, ...]:
    """Return the algorithms that have an option: by their entries, or all of a family if no entry names it."""
    found: list[str] = []
    for family, options in OPTIONS.items():
        if name in options_of(options):
            named = [one.name for one in ALGORITHMS.values() if one.family == family and name in one.options]
            found += [one for one in members(family) if not named or one in named]
    return tuple(found)


def supporting(compression: str) -> tuple[str, ...]:
    """Return the algorithms whose messages support this compression."""
    return tuple(name for name in OWN if compression in ALGORITHMS[name].compressions)


# -- presets -----------------------------------------------------------------------------------------------------------


class Preset(NamedTuple):
    """Published recipe: values of flags, by name.

    Attributes:
        lr_images: number of images per step of all ranks that the learning rate is for; None: any number.
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
        "--epochs 90 --warmup-epochs 5 --lr-decay-epochs 30,60,80, and --lr 0.1 per 256 images of a step of all ranks",
    ),
    "sgp-imagenet": Preset(
        _IMAGENET | {"nesterov": True}, 256, "SGP's (Assran et al., 2019): the same with --nesterov"
    ),
    "lsgd-imagenet": Preset(
        _IMAGENET | {"warmup_epochs": 0.0},
        None,
        "LSGD's (Teng et al., 2019): the same without warm-up, and --lr 0.1 at any number of ranks",
    ),
}


# -- flags -------------------------------------------------------------------------------------------------------------


def _epochs(text: str) -> tuple[float, ...]:
    """Parse a rising list of epochs."""
    try:
        epochs = tuple(Real(0, above=True)(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"{text!r} is not a list of epochs such as 30,60,80: {error}") from None
    if list(epochs) != sorted(set(epochs)):
        raise ValueError(f"{text!r}: the epochs must rise, as in 30,60,80")
    return epochs


_COUNT: dict[str, Any] = {"read": Whole(1), "metavar": "N"}
_POSITIVE: dict[str, Any] = {"read": Real(0, above=True), "metavar": "X"}
_SHARE: dict[str, Any] = {"read": Real(0, below=1), "metavar": "X"}
_FOLDER: dict[str, Any] = {"read": Path, "metavar": "DIR", "absent": "none"}


@dataclass(frozen=True, kw_only=True)
class AlgorithmFlags:
    """Flags of the group "algorithm", without the options of families."""

    compression: str = option(
        "none",
        "of gradients, with gossip of weights; allreduce supports none and fp16; int8, whose errors are corrected "
        f"later, is for {either(supporting('int8'), 'and')}",
        choices=tuple(dict.fromkeys(way for one in ALGORITHMS.values() for way in one.compressions)),
    )
    backward_passes_per_step: int = option(
        1, "backward passes, of --batch-size images each, per step", read=Whole(1), metavar="K"
    )
    inject: str = option(
        "none",
        f"make stragglers, which sleep before each step: {FORMS}; K random ranks per step, rank R, or rank i for "
        "i x SECONDS",
        metavar="SPEC",
    )


@dataclass(frozen=True, kw_only=True)
class DataFlags:
    """Flags of the group "data"."""

    data: str = option(
        "digits",
        "scikit-learn's handwritten digits, random images (for speed only), or a folder with train/<class>/*.jpeg and "
        "val/<class>/*.jpeg (also .jpg and .png)",
        metavar="digits|synthetic|DIR",
    )
    image_size: int = option(
        32, "side of the square images, in pixels", read=Whole(8), metavar="N", absent="32 for digits, else 224"
    )
    augment: bool = option(
        True, "vary the training images: digits by small shifts, rotations, zooms, a folder by random crops and flips"
    )
    workers: int | None = option(None, "decoding threads per rank for a folder", absent="4", **_COUNT)


@dataclass(frozen=True, kw_only=True)
class TrainingFlags:
    """Flags of the group "training"."""

    model: str = option("resnet50", "small: a tiny network with batch norm, for tests", choices=("resnet50", "small"))
    preset: str | None = option(
        None, "; ".join(f"{name}: {one.text}" for name, one in PRESETS.items()), choices=tuple(PRESETS), absent="none"
    )
    batch_size: int = option(16, "images per rank and backward pass", **_COUNT)
    epochs: int = option(16, "passes over the training images", **_COUNT)
    steps: int | None = option(
        None,
        "stop after N steps of the rank with the most batches (N rounds with --pace rounds), even in mid-epoch; the "
        "schedule still spans --epochs, and --resume continues from there",
        absent="no limit",
        **_COUNT,
    )
    minutes: float | None = option(
        None,
        "end after M minutes of training and tests, over which the schedule of --epochs is spread",
        read=Real(0, above=True),
        metavar="M",
        absent="no limit",
    )
    optimizer: str = option(
        "sgd",
        "lars: sgd whose rate in each layer is multiplied by 0.001 |weights| / (|gradient| + --weight-decay |weights|)",
        choices=("sgd", "adam", "adamw", "lars"),
    )
    lr: float = option(0.05, "peak learning rate; only a preset scales it by the number of ranks", **_POSITIVE)
    warmup_epochs: float = option(
        0.0, "epochs in which the rate rises linearly from a tenth to --lr", read=Real(0), metavar="N"
    )
    lr_decay_epochs: tuple[float, ...] = option(
        (), "epochs at which the rate falls to a tenth, such as 30,60,80", read=_epochs, metavar="N,N", absent="none"
    )
    cosine: bool = option(False, "let the rate fall to 0 along half a cosine")
    momentum: float = option(0.9, "of sgd and lars", **_SHARE)
    nesterov: bool = option(False, "Nesterov momentum, of sgd")
    weight_decay: float = option(
        0.0,
        "of sgd (added to the gradient), lars (in the layer's rate too) and adamw (decoupled); on kernels, not on "
        "biases and batch norm",
        read=Real(0),
        metavar="X",
    )
    label_smoothing: float = option(0.0, "share of the target that is spread over all classes", **_SHARE)
    fp16: bool = option(False, "compute in float16, with float32 weights and a scaled loss; overflows skip a step")
    bf16: bool = option(False, "compute in bfloat16, with float32 weights")
    bn_momentum: float = option(
        0.9, "share of its old value that a batch-norm average keeps per step, as in Keras; torch's is 1 - X", **_SHARE
    )
    seed: int = option(
        0, "of the weights, the order of the data, the delays and majority's draw", read=Whole(0), metavar="N"
    )
    threads: int | None = option(
        None, "CPU threads of the framework per rank", absent="the host's cores divided by its ranks", **_COUNT
    )


@dataclass(frozen=True, kw_only=True)
class OutputFlags:
    """Flags of the group "output"."""

    checkpoint_dir: Path | None = option(
        None,
        "keep the last and the best checkpoint there; ranks with weights of their own then start each epoch from the "
        "consensus; SIGUSR1 to all ranks saves a checkpoint at the next step and ends the run with status 75",
        **_FOLDER,
    )
    resume: bool = option(False, "continue from the last checkpoint of --checkpoint-dir, or start if there is none")
    log_dir: Path | None = option(
        None,
        "write metrics.csv and TensorBoard events there per epoch; at the end summary.json, step_times.csv and, with "
        "leaders, leaders.csv. scripts/plot.py draws them",
        **_FOLDER,
    )
    monitor: int | None = option(
        None,
        "sample waits, staleness and bytes every N steps; warn on stderr of a rank that always holds up the others, "
        "and write --log-dir's metrics.prom, for Prometheus, and monitor, for TensorBoard",
        absent="off",
        **_COUNT,
    )
    summary: Path | None = option(
        None, "write the figures of the run there, as JSON", read=Path, metavar="FILE", absent="none"
    )
    progress: str = option(
        "auto",
        "auto: a bar if stderr is a terminal, else a line per epoch; bar: also under horovodrun, which hides it",
        choices=("auto", "bar", "lines"),
    )
    eval_every: int = option(1, "epochs from one test to the next; the last epoch is always tested", **_COUNT)


GROUPS = {"algorithm": AlgorithmFlags, "data": DataFlags, "training": TrainingFlags, "output": OutputFlags}
TITLES = {"eager": "algorithm", "gossip": "gossip", "leader": "leaders"}
"""Titles of the groups with a family's options, if not the family's name."""
NONE_IF_ABSENT = {*_IMAGENET, "augment", "image_size"}
"""Flags without a default in the parser, since another flag may set it."""
OPTIMIZERS_WITH = {"momentum": ("sgd", "lars"), "nesterov": ("sgd",), "weight_decay": ("sgd", "adamw", "lars")}
HOROVODS = ("none", "fp16")
"""Compressions of Horovod's own allreduce."""
EXCLUSIVE = (
    ("fp16", "bf16", "are two kinds of mixed precision: pass one of them"),
    ("steps", "minutes", "both determine the end of the run: pass one of them"),
    ("minutes", "resume", "do not go together, as --resume continues up to --epochs or --steps: leave one of them out"),
)


@dataclass(frozen=True, kw_only=True)
class Options(AlgorithmFlags, DataFlags, TrainingFlags, OutputFlags):
    """A checked command line with all defaults filled in.

    Attributes:
        framework: "torch" or "tensorflow".
        algorithm: its name.
        own: the options of the algorithm's family, as its optimizer takes them; None: Horovod's allreduce.
        lr_images: number of images that the learning rate is for, until ``at`` has scaled it; None: any number.
    """

    framework: str
    algorithm: str
    own: Any
    lr_images: int | None = None

    @property
    def lockstep(self) -> bool:
        """Whether all ranks must take the same number of steps: plain allreduce hangs otherwise."""
        return self.own is None

    @property
    def gossips(self) -> bool:
        """Whether ranks have weights of their own and mix them."""
        return isinstance(self.own, GossipOptions)

    @property
    def follows(self) -> bool:
        """Whether ranks have weights of their own and are pulled towards a leader or a center."""
        return isinstance(self.own, LeaderOptions)

    @property
    def has_own_weights(self) -> bool:
        """Whether ranks have weights of their own."""
        return self.gossips or self.follows

    @property
    def quorum(self) -> Any:
        """The quorum of a round; None without rounds."""
        return getattr(self.own, "quorum", None)

    @property
    def weighted(self) -> bool:
        """Whether rounds are weighted by the images of each gradient."""
        return getattr(self.own, "weighting", None) == "samples"

    @property
    def by_rounds(self) -> bool:
        """Whether an epoch is a number of rounds instead of a number of steps per rank."""
        return getattr(self.own, "pace", None) == "rounds"

    @property
    def precision(self) -> str:
        """The precision to compute in: "fp32", "fp16" or "bf16"."""
        return "fp16" if self.fp16 else "bf16" if self.bf16 else "fp32"

    @property
    def step_images(self) -> int:
        """Images of one rank in a step."""
        return self.batch_size * self.backward_passes_per_step

    @property
    def schedule(self) -> Schedule:
        """The learning rate by epoch. ValueError if the flags contradict each other."""
        return Schedule(self.lr, self.epochs, self.warmup_epochs, self.lr_decay_epochs, cosine=self.cosine)

    @property
    def injector(self) -> Injector:
        """The injected delays. ValueError if --inject is not valid."""
        return Injector.parse(self.inject, self.seed)

    @property
    def init_settings(self) -> dict[str, Any]:
        """Keyword arguments of ``hvd.init``: leaders' groups need process sets, whose ranks are not known yet.

        Only if there may be several groups: process sets slow down each of Horovod's cycles, idle ones included.
        """
        has_groups = "group" in ALGORITHMS[self.algorithm].options and not _is_single_group(self.own.group)
        return {"process_sets": "dynamic"} if has_groups else {}

    @property
    def settings(self) -> dict[str, Any]:
        """Keyword arguments of the algorithm's optimizer that are common to both frameworks."""
        return {} if self.own is None else dict(vars(self.own))

    def at(self, size: int) -> Options:
        """Return the options of a job of ``size`` ranks, with the learning rate scaled if a preset asks for it.

        Raises:
            ValueError: they do not fit such a job.
        """
        self.injector.check(size)
        if self.own is not None:
            self.own.check(size)
        if self.lr_images is None:
            return self
        return dataclasses.replace(self, lr=self.lr * self.step_images * size / self.lr_images, lr_images=None)


def _is_single_group(group: str | int | None) -> bool:
    """Whether each rank is a group, or all ranks are one, as far as the launcher reports it."""
    started = launch.known(os.environ)
    ranks = started.local_size if group in (None, "host") else group
    # (If this host has one rank, another may have more; and without a known launcher MPI may know of more.)
    return group == 1 or (started.size > 1 and str(ranks) == str(started.size))


# -- the parser --------------------------------------------------------------------------------------------------------


def family_flags() -> dict[str, list[tuple[str, Option, Any]]]:
    """Return for each option that has a flag the family, the description and the default of each family that has it."""
    found: dict[str, list[tuple[str, Option, Any]]] = {}
    for family, options in OPTIONS.items():
        for name, described in options_of(options).items():
            if described.flags != ():
                found.setdefault(name, []).append((family, described, getattr(options, name)))
    return found


EXAMPLES = """examples, each after `{launch} {script}`:
  --model small --epochs 4                                   a first run, a minute on a CPU
  --model small --inject random:1:0.3                        one random rank is late in each step
  --model small --algorithm local --average-every 4          local steps
  --data DIR --preset eager-imagenet --checkpoint-dir ckpt   ImageNet, with checkpoints

"""
"""First part of the help."""


def build_parser(framework: str) -> argparse.ArgumentParser:
    """Return the parser of ``framework``'s script."""
    script = f"{'torch' if framework == 'torch' else 'tf'}_models/resnet50.py"
    launch = "torchrun --nproc-per-node 2" if framework == "torch" else "horovodrun -np 2 --gloo python"
    parser = argparse.ArgumentParser(
        prog="resnet50.py",
        usage=f"{launch} {script} [FLAG ...]",
        formatter_class=functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=30, width=110),
        description=EXAMPLES.format(launch=launch, script=script)
        + f"It trains ResNet-50 by {', '.join(SYNCHRONOUS)}, partial allreduce ({', '.join(members('eager'))}), gossip"
        f" ({', '.join(members('gossip'))})\nor leaders ({', '.join(members('leader'))}). "
        "A flag takes precedence over --preset.",
    )
    titles = dict.fromkeys([*(TITLES.get(family, family) for family in OPTIONS), *GROUPS])
    groups = {title: parser.add_argument_group(title) for title in titles}
    groups["algorithm"].add_argument(
        "--algorithm", choices=(*SYNCHRONOUS, *OWN), default=members("eager")[0], help=_algorithm_help()
    )
    for name, families in family_flags().items():
        family, described, default = families[0]
        text = "; ".join(_family_help(name, *one) for one in families)
        _add(groups[TITLES.get(family, family)], name, described, default, text, if_given=True)
    for title, fields in GROUPS.items():
        for name, described in options_of(fields).items():
            default = getattr(fields, name)
            text = f"{described.doc} (default: {_shown(described, default)})"
            _add(groups[title], name, described, default, text, if_given=name in NONE_IF_ABSENT)
    return parser


def _add(group: Any, name: str, described: Option, default: Any, text: str, *, if_given: bool) -> None:
    """Add a flag to a group; ``if_given``: its default is None."""
    more: dict[str, Any]
    if isinstance(default, bool):
        more = {"action": argparse.BooleanOptionalAction if name in NONE_IF_ABSENT else "store_true"}
    else:
        read = None if described.read is None else _reader(described.read)
        more = {"metavar": described.metavar, "choices": described.choices or None, "type": read}
    more |= {"dest": name, "default": None if if_given else default, "help": text.replace("%", "%%")}
    group.add_argument(*(described.flags or (flag(name),)), **more)


def _reader(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a converter whose errors argparse shows."""

    def value(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return value


def _algorithm_help() -> str:
    def clauses(family: str, joint: str) -> str:
        return ", ".join(f"{name}{joint}{ALGORITHMS[name].about}" for name in members(family))

    return (
        f"{SYNCHRONOUS[0]}: Horovod's synchronous SGD; {clauses('eager', ': ')}; gossip, where a rank mixes its "
        f"weights with those of a few others: {clauses('gossip', ' ')}; leaders, where ranks train separately and are "
        f"pulled now and then: {clauses('leader', ' ')} (default: {members('eager')[0]})"
    )


def _family_help(name: str, family: str, described: Option, default: Any) -> str:
    having = [one for one in owners(name) if one in members(family)]
    who = "" if 1 < len(having) == len(members(family)) else f"of {either(having, 'and')}: "
    # (the algorithms and the default are added here)
    doc = re.sub(r"^of [^:]+: |; None: .*$", "", described.doc).replace("``", "")
    return f"{who}{described.help or in_flags(doc, OPTIONS[family])} (default: {_shown(described, default)})"


def _shown(described: Option, default: Any) -> str:
    if described.absent:
        return described.absent
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"{default:g}" if isinstance(default, float) else str(default)


# -- from the command line to the options ------------------------------------------------------------------------------


def parse(framework: str, argv: Sequence[str] | None = None) -> Options:
    """Return the options of a command line (``argv``; None: of this process) of the script of ``framework``.

    Ends the process with a message on stderr and status 2 if an option is wrong, as argparse does.
    """
    parser = build_parser(framework)
    values = vars(parser.parse_args(argv))
    try:
        own = _take_own(values)
        options = Options(framework=framework, own=own, **_filled_in(values))
        options.schedule, options.injector  # noqa: B018  (they raise)
        _check(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def _take_own(values: dict[str, Any]) -> Any:
    """Pop the family's options from the flags' values; None for Horovod's allreduce. Refuse other families' flags."""
    algorithm = values["algorithm"]
    algorithms = list(_algorithms(algorithm, values["schedule"] or {}))
    given: dict[str, Any] = {}
    for name in family_flags():
        value = values.pop(name)
        if value is None:
            continue
        if not set(owners(name)) & set(algorithms):
            raise ValueError(f"{flag(name)} only means something with --algorithm {either(owners(name))}: leave it out")
        given[name] = value
    _check_compression(values["compression"], algorithm, algorithms)
    if algorithm in SYNCHRONOUS:
        return None
    family = OPTIONS[ALGORITHMS[algorithm].family]
    names = options_of(family)
    given |= {name: values[name] for name in ("algorithm", "seed") if name in names}
    own = family(**{name: value for name, value in given.items() if name in names})
    try:
        own.check(None)  # (Options.at checks what depends on the number of ranks)
    except ValueError as error:
        raise ValueError(in_flags(str(error), family)) from None
    return own


def _algorithms(algorithm: str, switches: Mapping[int, str]) -> Iterator[str]:
    """Yield all algorithms of the run; refuse a --schedule that does not go with --algorithm."""
    if switches and algorithm not in owners("schedule"):
        raise ValueError(
            f"--schedule needs --algorithm {either(owners('schedule'))}: leave it out, or pass one of these"
        )
    if 0 not in switches:
        yield algorithm
    elif algorithm not in switches.values():
        raise ValueError(
            f"--schedule starts with {switches[0]} and never switches to --algorithm {algorithm}: make them agree"
        )
    yield from switches.values()


def _check_compression(compression: str, algorithm: str, algorithms: Collection[str]) -> None:
    """Refuse options that an algorithm of the run does not support."""
    known = [HOROVODS if algorithm in SYNCHRONOUS else ALGORITHMS[algorithm].compressions]
    known += [ALGORITHMS[one].compressions for one in algorithms if one not in SYNCHRONOUS]
    common = [way for way in known[0] if all(way in each for each in known)]
    if compression not in common:
        raise ValueError(
            f"--compression must be {either(common)} with --algorithm {algorithm}, got {compression}; bf16 is for "
            f"{either(supporting('bf16'))}, int8 for {either(supporting('int8'))}"
        )


def _filled_in(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with the preset's, without omitted flags; refuse flags that do not fit the optimizer."""
    given = {name: value for name, value in values.items() if value is not None}
    preset = PRESETS.get(given.get("preset", ""))
    filled = {**(preset.values if preset else {}), **given}
    if preset and "lr" not in given:
        filled["lr_images"] = preset.lr_images
    if given.get("cosine") and "lr_decay_epochs" not in given:
        filled.pop("lr_decay_epochs", None)
    optimizer = filled.get("optimizer", TrainingFlags.optimizer)
    for name, having in OPTIMIZERS_WITH.items():
        if optimizer in having:
            continue
        if name in given:
            raise ValueError(
                f"{flag(name)} does not go with --optimizer {optimizer}: leave it out, or pass {either(having)}"
            )
        filled.pop(name, None)
    if given["data"] == "synthetic":
        if "augment" in given:
            raise ValueError("--augment has nothing to vary in synthetic images: leave it out")
        filled["augment"] = False
    if given["data"] != "digits":
        filled.setdefault("image_size", 224)
    return filled


def _check(options: Options) -> None:
    """Refuse flags that contradict each other."""
    for one, other, why in EXCLUSIVE:
        if getattr(options, one) and getattr(options, other):
            raise ValueError(f"{flag(one)} and {flag(other)} {why}")
    if options.nesterov and not options.momentum:
        raise ValueError("--nesterov needs a --momentum above 0: raise it, or pass --no-nesterov")
    if options.monitor is not None and options.lockstep:
        raise ValueError(
            f"--monitor shows counts of this library's optimizers, and --algorithm {options.algorithm} is Horovod's: "
            "pass --algorithm eager --quorum all"
        )
    if options.resume and options.checkpoint_dir is None:
        raise ValueError("--resume needs --checkpoint-dir, the folder that holds the checkpoints")
    if options.data in EMBEDDED and options.workers is not None:
        raise ValueError("--workers is for an image folder, --data DIR: leave it out")
    if options.data not in EMBEDDED and not Path(options.data).is_dir():
        raise ValueError(f"--data must be digits, synthetic or a folder with train/ and val/, got {options.data}")
