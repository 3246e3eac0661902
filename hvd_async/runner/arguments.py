"""The flags of the runners, one parser for both frameworks, with their help; what they yield is checked elsewhere.

Those of the algorithms' own options are made from the families' dataclasses and tables. Flags say None where they were
not given, so that a preset can tell.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from hvd_async.algorithms.option import Option, Real, Whole, either, flag, in_flags, options_of
from hvd_async.algorithms.registry import ALGORITHMS, OPTIONS
from hvd_async.runtime.protocol import Algorithm

from .presets import PRESETS, help_text
from .stragglers import FORMS

OPTIMIZERS = ("sgd", "adam", "adamw", "lars")
SYNCHRONOUS = tuple(name for name, each in ALGORITHMS.items() if each.waits_for == "all")
"""Horovod's own allreduce, for which nothing is wrapped; gossip can switch to it, and then averages all weights."""
OWN = tuple(name for name in ALGORITHMS if name not in SYNCHRONOUS)
GROUPS = {"eager": "algorithm", "gossip": "gossip", "leader": "leaders"}
"""Titles of the groups of flags in which families have theirs, if not their names."""
_Add: TypeAlias = Callable[..., argparse.Action]
"""A group's ``add_argument``."""


def members(family: str) -> tuple[str, ...]:
    """Return the algorithms of a family that a run may be of, beside Horovod's."""
    return tuple(name for name in OWN if ALGORITHMS[name].family == family)


def owners(name: str) -> tuple[str, ...]:
    """Return the algorithms that have an option: those whose entry names it, or a family's all if none's does."""
    found: list[str] = []
    for family, options in OPTIONS.items():
        if name in options_of(options):
            every = [each for each in ALGORITHMS.values() if each.family == family]
            named = [each.name for each in every if name in each.options]
            found += [each for each in members(family) if not named or each in named]
    return tuple(found)


def own_flags() -> dict[str, list[tuple[str, Option, Any]]]:
    """Return for each option that has a flag the family, the description and the default of each family that has it."""
    found: dict[str, list[tuple[str, Option, Any]]] = {}
    for family, options in OPTIONS.items():
        for name, described in options_of(options).items():
            if described.flags != ():
                found.setdefault(name, []).append((family, described, getattr(options, name)))
    return found


def build_parser(framework: str) -> argparse.ArgumentParser:
    """The parser alone, for help texts and tests."""
    parser = argparse.ArgumentParser(
        prog="resnet50.py",
        formatter_class=_Help,
        description=f"Train ResNet-50 with {framework} and Horovod: by {', '.join(SYNCHRONOUS)}, by partial allreduce "
        f"({', '.join(members('eager'))}), by gossip ({', '.join(members('gossip'))}), or after a leader "
        f"({', '.join(members('leader'))}). A flag that is given wins over what --preset sets.",
        epilog="example: horovodrun -np 4 --gloo python resnet50.py --algorithm eager --quorum majority --data digits "
        "--image-size 32 --optimizer adam --lr 0.001 --cosine --inject random:1:0.3 --summary out.json",
    )
    _algorithm_flags(parser)
    _data_flags(parser)
    _training_flags(parser)
    _output_flags(parser)
    return parser


def _read(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a reader whose errors argparse tells in its own words."""

    def value(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return value


def count(least: int) -> Callable[[str], int]:
    """A whole number, not below ``least``."""
    return _read(Whole(least))


def number(least: float, *, below: float = math.inf, open_: bool = False) -> Callable[[str], float]:
    """A finite number in [least, below), or in (least, below) if `open_`."""
    return _read(Real(least, below, open_))


def marks(text: str) -> tuple[float, ...]:
    """Epochs, rising."""
    try:
        marks = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of epochs: write 30,60,80") from None
    if any(not math.isfinite(mark) or mark <= 0 for mark in marks) or list(marks) != sorted(set(marks)):
        raise argparse.ArgumentTypeError(f"{text!r}: the epochs must be above 0 and rise")
    return marks


class _Help(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=110)


def _algorithm_flags(parser: argparse.ArgumentParser) -> None:
    groups = {title: parser.add_argument_group(title) for title in (GROUPS.get(one, one) for one in OPTIONS)}
    add = groups["algorithm"].add_argument
    add("--algorithm", choices=(*SYNCHRONOUS, *OWN), default=members("eager")[0], help=_algorithm_help())
    for name, families in own_flags().items():
        title = GROUPS.get(families[0][0], families[0][0])
        _add_own(groups[title], name, families, of_all=title == "algorithm")
    known = dict.fromkeys(way for each in ALGORITHMS.values() for way in each.compressions)
    add(
        "--compression",
        choices=tuple(known),
        default="none",
        help="how gradients travel, with gossip weights; allreduce knows none and fp16; int8, which makes up for its "
        f"errors later, is for {either(knowing('int8'), 'and')} (default: none)",
    )
    add(
        "--backward-passes-per-step",
        type=count(1),
        default=1,
        metavar="K",
        help="a step is K backward passes of --batch-size images each, so that fewer gradients travel (default: 1)",
    )
    add(
        "--inject",
        default="none",
        metavar="SPEC",
        help=f"make stragglers: before each step ranks sleep by {FORMS}; K random ranks each step, rank R, or rank i "
        "for i x SECONDS (default: none)",
    )


def knowing(compression: str) -> tuple[str, ...]:
    """Return the algorithms whose messages may travel so."""
    return tuple(name for name in OWN if compression in ALGORITHMS[name].compressions)


def _algorithm_help() -> str:
    def told(family: str, joint: str) -> str:
        each: list[Algorithm] = [ALGORITHMS[name] for name in members(family)]
        return ", ".join(f"{one.name}{joint}{one.about}" for one in each)

    return (
        f"{SYNCHRONOUS[0]}: Horovod's synchronous SGD; {told('eager', ': ')}; gossip, in which a rank mixes its "
        f"weights with those of a few others: {told('gossip', ' ')}; and ranks that train by themselves and are pulled "
        f"now and then: {told('leader', ' ')} (default: {members('eager')[0]})"
    )


def _add_own(group: argparse._ArgumentGroup, name: str, families: list[tuple[str, Option, Any]], of_all: bool) -> None:
    """Add the flag of an option, whose help says which algorithms have it: in a group ``of_all`` always, else where
    some of the family do not."""
    told = []
    for family, described, default in families:
        mine = [each for each in owners(name) if each in members(family)]
        some = f"{', '.join(mine)}: " if of_all else f"of {either(mine, 'and')}: "
        shown = described.absent or (f"{default:g}" if isinstance(default, float) else str(default))
        who = some if of_all or len(mine) < len(members(family)) else ""
        text = described.help or in_flags(_shortened(described.doc), OPTIONS[family])
        told.append(f"{who}{text} (default: {shown})".replace("%", "%%"))
    _, described, default = families[0]
    more: dict[str, Any] = {"dest": name, "help": "; ".join(told)}
    if isinstance(default, bool):
        more |= {"action": "store_true", "default": None}
    else:
        more |= {"metavar": described.metavar, "choices": described.choices or None}
        more |= {} if described.read is None else {"type": _read(described.read)}
    group.add_argument(*(described.flags or (flag(name),)), **more)


def _shortened(doc: str) -> str:
    """Return an option's description without what a flag's help says by itself: whose it is, and its default."""
    return re.sub(r"^of [^:]+: |; None: .*$", "", doc).replace("``", "")


def _data_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("data").add_argument
    add(
        "--data",
        default="digits",
        metavar="digits|synthetic|DIR",
        help="scikit-learn's handwritten digits, random images (for speed only), or a folder with train/<class>/*.jpeg "
        "and val/<class>/*.jpeg (.jpg and .png too) (default: digits)",
    )
    add(
        "--image-size",
        type=count(8),
        metavar="N",
        help="side of the square images, pixels (default: 32 for digits, else 224)",
    )
    add(
        "--augment",
        action=argparse.BooleanOptionalAction,
        help="vary the training images: digits by small shifts, rotations, zooms, a folder by random crops and flips "
        "(default: on)",
    )
    add("--workers", type=count(1), metavar="N", help="a folder's decoding threads per rank (default: 4)")


def _training_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("training").add_argument
    _length_flags(add)
    _update_flags(add)
    _arithmetic_flags(add)


def _length_flags(add: _Add) -> None:
    """Add those that say which model is trained on how many images."""
    add(
        "--model",
        choices=("resnet50", "small"),
        default="resnet50",
        help="small is a tiny network with batch norm, for quick tries (default: resnet50)",
    )
    add("--preset", choices=PRESETS, help=f"{help_text()} (default: none)")
    add("--batch-size", type=count(1), metavar="N", help="images per rank and backward pass (default: 16)")
    add("--epochs", type=count(1), metavar="N", help="passes over the training images (default: 16)")
    add(
        "--steps",
        type=count(1),
        metavar="N",
        help="stop after N steps of the rank with the most batches (N rounds with --pace rounds), even in mid-epoch; "
        "the schedule still spans --epochs, and --resume goes on from there (default: no cap)",
    )
    add(
        "--minutes",
        type=number(0, open_=True),
        metavar="M",
        help="end after M minutes of training, tests in between included, whatever the machine does in them: the "
        "learning rate's schedule, --epochs long, is spread over that time (default: no limit)",
    )


def _update_flags(add: _Add) -> None:
    """Add those of the optimizer, its learning rate and the loss."""
    add(
        "--optimizer",
        choices=OPTIMIZERS,
        help="lars: sgd whose rate follows, layer by layer, 0.001 |weights| / (|gradient| + --weight-decay |weights|) "
        "(default: sgd)",
    )
    add(
        "--lr",
        type=number(0, open_=True),
        metavar="X",
        help="peak learning rate of the whole job: not scaled by the number of ranks, but by a preset (default: 0.05)",
    )
    add(
        "--warmup-epochs",
        type=number(0),
        metavar="N",
        help="epochs in which the rate rises linearly from a tenth to --lr (default: 0)",
    )
    add(
        "--lr-decay-epochs",
        type=marks,
        metavar="N,N",
        help="epochs at which the rate falls to a tenth, such as 30,60,80 (default: none)",
    )
    add("--cosine", action="store_true", help="let the rate fall to 0 along half a cosine (default: off)")
    add("--momentum", type=number(0, below=1), metavar="X", help="of sgd and lars (default: 0.9)")
    add("--nesterov", action=argparse.BooleanOptionalAction, help="Nesterov momentum, of sgd (default: off)")
    add(
        "--weight-decay",
        type=number(0),
        metavar="X",
        help="of sgd (added to the gradient), lars (inside the layer's rate too) and adamw (decoupled), on kernels "
        "only: not on biases and batch norm (default: 0)",
    )
    add("--label-smoothing", type=number(0, below=1), default=0.0, metavar="X", help="(default: 0)")


def _arithmetic_flags(add: _Add) -> None:
    """Add those that say how numbers are computed: types, statistics of batches, seed, threads."""
    add(
        "--fp16",
        action="store_true",
        help="compute in float16 where that is safe, with weights in float32 and a loss that is scaled; a step that "
        "overflows is skipped (default: off)",
    )
    add("--bf16", action="store_true", help="the same in bfloat16, which needs no scaling (default: off)")
    add(
        "--bn-momentum",
        type=number(0, below=1),
        default=0.9,
        metavar="X",
        help="share of its old value that a batch-norm running average keeps each step, which is Keras' meaning of the "
        "word; torch's own momentum is 1 - X (default: 0.9)",
    )
    add(
        "--seed",
        type=count(0),
        default=0,
        metavar="N",
        help="of the weights, the order of the data, the delays and majority's draw (default: 0)",
    )
    add(
        "--threads",
        type=count(1),
        metavar="N",
        help="CPU threads of the framework per rank (default: the host's cores shared by its ranks)",
    )


def _output_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("output").add_argument
    add(
        "--checkpoint-dir",
        type=Path,
        metavar="DIR",
        help="keep the last and the best checkpoint there; in gossip all ranks then begin each epoch at their average, "
        "after a leader at the leader's weights; SIGUSR1 to all ranks then saves one at the next step and ends the run "
        "with status 75 (default: none)",
    )
    add(
        "--resume",
        action="store_true",
        help="go on from the last checkpoint of --checkpoint-dir; start afresh if there is none yet",
    )
    add(
        "--log-dir",
        type=Path,
        metavar="DIR",
        help="write metrics.csv and TensorBoard events there, epoch by epoch; at the end summary.json, step_times.csv "
        "and, after leaders, leaders.csv. scripts/plot.py draws them (default: none)",
    )
    add(
        "--monitor",
        type=count(1),
        metavar="N",
        help="look every N steps at how long ranks wait, and for whom, and at staleness and bytes; say on stderr if "
        "one rank holds up the others for good, and write --log-dir's metrics.prom, for Prometheus, and monitor, for "
        "TensorBoard (default: off)",
    )
    add("--summary", type=Path, metavar="FILE", help="write the run's figures there, as JSON (default: none)")
    add(
        "--progress",
        choices=("auto", "bar", "lines"),
        default="auto",
        help="auto: a bar if stderr is a terminal, else one line per epoch; horovodrun hides the terminal, and bar "
        "asks for the bar all the same (default: auto)",
    )
    add(
        "--eval-every",
        type=count(1),
        default=1,
        metavar="N",
        help="epochs from one test to the next; the last epoch is always tested (default: 1)",
    )
