"""The flags of the runners, one parser for both frameworks, with their help; what they yield is checked elsewhere.

Flags say None where they were not given, so that a preset can tell.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from ..activation import parse_quorum
from ..mixing import SCHEMES
from ..topology import NAMED, WITH_PEERS
from .inject import FORMS
from .presets import PRESETS, help_text

GOSSIP = ("sgp", "osgp", "dpsgd", "adpsgd")
ALGORITHMS = ("allreduce", "eager", *GOSSIP)
PHASES = ("allreduce", *GOSSIP)
"""The algorithms between which a gossiping run can switch; allreduce averages weights over all ranks at each step."""
OPTIMIZERS = ("sgd", "adam", "adamw", "lars")
T = TypeVar("T")


def build_parser(framework: str) -> argparse.ArgumentParser:
    """The parser alone, for help texts and tests."""
    parser = argparse.ArgumentParser(
        prog="resnet50.py",
        formatter_class=_Help,
        description=f"Train ResNet-50 with {framework} and Horovod: by allreduce, by partial allreduce (eager), or by "
        "gossip (sgp, osgp, dpsgd, adpsgd). A flag that is given wins over what --preset sets.",
        epilog="example: horovodrun -np 4 --gloo python resnet50.py --algorithm eager --quorum majority --data digits "
        "--image-size 32 --optimizer adam --lr 0.001 --cosine --inject random:1:0.3 --summary out.json",
    )
    _algorithm_flags(parser)
    _gossip_flags(parser)
    _data_flags(parser)
    _training_flags(parser)
    _output_flags(parser)
    return parser


class _Help(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=110)


def _algorithm_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("algorithm").add_argument
    add(
        "--algorithm",
        choices=ALGORITHMS,
        default="eager",
        help="allreduce: Horovod's synchronous SGD; eager: rounds that do not wait for late ranks; the rest is gossip, "
        "in which a rank mixes its weights with those of a few others: sgp waits for their messages, osgp takes them "
        "in up to --max-staleness steps later, dpsgd wants a symmetric graph, adpsgd averages with whichever neighbour "
        "is ready (default: eager)",
    )
    add(
        "--quorum",
        type=parse_quorum,
        metavar="Q",
        help="eager: who fires a round: solo (the first rank), majority (a rank drawn anew each round), all, a count "
        "of ranks, a fraction such as 0.75, or auto, which learns from the arrival times (default: solo)",
    )
    add(
        "--max-staleness",
        type=_count(0),
        metavar="N",
        help="eager: how many rounds late a gradient may be, 0 is synchronous (default: 16); osgp: how many steps late "
        "a message may be, 0 is sgp (default: 1)",
    )
    add(
        "--grace",
        type=_number(0),
        metavar="S",
        help="eager: seconds a round still waits for more ranks once the quorum is there (default: 0)",
    )
    add(
        "--pace",
        choices=("steps", "rounds"),
        help="eager: steps: every rank goes through its batches once an epoch; rounds: an epoch is as many rounds as "
        "the longest rank has batches, and a rank that is slow for good gives fewer gradients (default: steps)",
    )
    add(
        "--compression",
        choices=("none", "fp16", "bf16", "int8"),
        default="none",
        help="how gradients travel, with gossip weights; allreduce knows none and fp16; int8, which makes up for its "
        "errors later, is for sgp, osgp and dpsgd (default: none)",
    )
    add(
        "--backward-passes-per-step",
        type=_count(1),
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


def _gossip_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("gossip").add_argument
    add(
        "--topology",
        choices=tuple(NAMED),
        metavar="NAME",
        help=f"who sends to whom: {', '.join(NAMED)}; dpsgd and adpsgd need a symmetric one (default: "
        "bipartite-exponential for these two, exponential for sgp and osgp)",
    )
    add(
        "--peers",
        type=_peers,
        metavar="N",
        help=f"to how many ranks a rank sends at a step, of the topologies {' and '.join(WITH_PEERS)}; 0:1,30:2 is 1 "
        "from epoch 0 and 2 from epoch 30 on (default: 1)",
    )
    add(
        "--mixing",
        choices=SCHEMES,
        help="of sgp, osgp and dpsgd: uniform parts what a rank has equally among itself and its receivers; metropolis "
        "weighs by the larger number of neighbours of the two, as dpsgd needs it where these differ, such as on a star "
        "(default: uniform)",
    )
    add(
        "--hierarchical-gossip",
        "--hierarchical",
        dest="hierarchical",
        action="store_true",
        default=None,
        help="of sgp, osgp and dpsgd: average the ranks of a host first, and gossip from host to host; the short form "
        "does not get past horovodrun, which has flags that begin so (default: off)",
    )
    add(
        "--average-every",
        type=_count(0),
        metavar="N",
        help="of sgp, osgp and dpsgd: average the weights of all ranks every N steps; 0 is never (default: 0)",
    )
    add(
        "--max-local-steps",
        type=_count(1),
        metavar="N",
        help="of adpsgd: steps that a rank may take between two averagings, before it waits for one (default: 4)",
    )
    add(
        "--schedule",
        type=_switches,
        dest="switches",
        metavar="E:NAME,...",
        help="the algorithm from epoch E on: 0:allreduce,5:sgp is allreduce in epochs 0 to 4, then sgp "
        "(default: --algorithm in all epochs)",
    )


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
        type=_count(8),
        metavar="N",
        help="side of the square images, pixels (default: 32 for digits, else 224)",
    )
    add(
        "--augment",
        action=argparse.BooleanOptionalAction,
        help="vary the training images: digits by small shifts, rotations, zooms, a folder by random crops and flips "
        "(default: on)",
    )
    add("--workers", type=_count(1), metavar="N", help="a folder's decoding threads per rank (default: 4)")


def _training_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("training").add_argument
    add(
        "--model",
        choices=("resnet50", "small"),
        default="resnet50",
        help="small is a tiny network with batch norm, for quick tries (default: resnet50)",
    )
    add("--preset", choices=PRESETS, help=f"{help_text()} (default: none)")
    add("--batch-size", type=_count(1), metavar="N", help="images per rank and backward pass (default: 16)")
    add("--epochs", type=_count(1), metavar="N", help="passes over the training images (default: 16)")
    add(
        "--steps",
        type=_count(1),
        metavar="N",
        help="stop after N steps of the rank with the most batches (N rounds with --pace rounds), even in mid-epoch; "
        "the schedule still spans --epochs, and --resume goes on from there (default: no cap)",
    )
    add(
        "--optimizer",
        choices=OPTIMIZERS,
        help="lars: sgd whose rate follows, layer by layer, 0.001 |weights| / (|gradient| + --weight-decay |weights|) "
        "(default: sgd)",
    )
    add(
        "--lr",
        type=_number(0, open_=True),
        metavar="X",
        help="peak learning rate of the whole job: not scaled by the number of ranks, but by a preset (default: 0.05)",
    )
    add(
        "--warmup-epochs",
        type=_number(0),
        metavar="N",
        help="epochs in which the rate rises linearly from a tenth to --lr (default: 0)",
    )
    add(
        "--lr-decay-epochs",
        type=_marks,
        metavar="N,N",
        help="epochs at which the rate falls to a tenth, such as 30,60,80 (default: none)",
    )
    add("--cosine", action="store_true", help="let the rate fall to 0 along half a cosine (default: off)")
    add("--momentum", type=_number(0, below=1), metavar="X", help="of sgd and lars (default: 0.9)")
    add("--nesterov", action=argparse.BooleanOptionalAction, help="Nesterov momentum, of sgd (default: off)")
    add(
        "--weight-decay",
        type=_number(0),
        metavar="X",
        help="of sgd (added to the gradient), lars (inside the layer's rate too) and adamw (decoupled), on kernels "
        "only: not on biases and batch norm (default: 0)",
    )
    add("--label-smoothing", type=_number(0, below=1), default=0.0, metavar="X", help="(default: 0)")
    add(
        "--fp16",
        action="store_true",
        help="compute in float16 where that is safe, with weights in float32 and a loss that is scaled; a step that "
        "overflows is skipped (default: off)",
    )
    add("--bf16", action="store_true", help="the same in bfloat16, which needs no scaling (default: off)")
    add(
        "--bn-momentum",
        type=_number(0, below=1),
        default=0.9,
        metavar="X",
        help="share of its old value that a batch-norm running average keeps each step, which is Keras' meaning of the "
        "word; torch's own momentum is 1 - X (default: 0.9)",
    )
    add(
        "--seed",
        type=_count(0),
        default=0,
        metavar="N",
        help="of the weights, the order of the data, the delays and majority's draw (default: 0)",
    )
    add(
        "--threads",
        type=_count(1),
        metavar="N",
        help="CPU threads of the framework per rank (default: the host's cores shared by its ranks)",
    )


def _output_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("output").add_argument
    add(
        "--checkpoint-dir",
        type=Path,
        metavar="DIR",
        help="keep the last and the best checkpoint there; in gossip all ranks then begin each epoch at their average; "
        "SIGUSR1 to all ranks then saves one at the next step and ends the run with status 75 (default: none)",
    )
    add(
        "--resume",
        action="store_true",
        help="go on from the last checkpoint of --checkpoint-dir; start afresh if there is none yet",
    )
    add("--log-dir", type=Path, metavar="DIR", help="write metrics.csv and TensorBoard events there (default: none)")
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
        type=_count(1),
        default=1,
        metavar="N",
        help="epochs from one test to the next; the last epoch is always tested (default: 1)",
    )


def _count(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is too small: give {least} or more")
        return value

    return read


def _number(least: float, *, below: float = math.inf, open_: bool = False) -> Callable[[str], float]:
    """A finite number in [least, below), or in (least, below) if `open_`."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not math.isfinite(value) or not least <= value < below or (open_ and value == least):
            bounds = f"{'above' if open_ else 'at least'} {least:g}" + (
                f" and below {below:g}" if below < math.inf else ""
            )
            raise argparse.ArgumentTypeError(f"{text} must be {bounds}")
        return value

    return read


def _marks(text: str) -> tuple[float, ...]:
    try:
        marks = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of epochs: write 30,60,80") from None
    if any(not math.isfinite(mark) or mark <= 0 for mark in marks) or list(marks) != sorted(set(marks)):
        raise argparse.ArgumentTypeError(f"{text!r}: the epochs must be above 0 and rise")
    return marks


def _peers(text: str) -> int | dict[int, int]:
    count = _count(1)
    if ":" not in text:
        return count(text)
    found = _by_epoch(text, "0:1,30:2", count)
    if 0 not in found:
        raise argparse.ArgumentTypeError(f"{text!r} does not say how many from the start: begin with 0:, as 0:1,30:2")
    return found


def _switches(text: str) -> dict[int, str]:
    return _by_epoch(text, "0:allreduce,5:sgp", _one_of(PHASES))


def _by_epoch(text: str, example: str, read: Callable[[str], T]) -> dict[int, T]:
    """Reads EPOCH:VALUE,EPOCH:VALUE."""
    found: dict[int, T] = {}
    for part in text.split(","):
        epoch, colon, value = part.partition(":")
        if not (colon and epoch.strip().isdecimal()):
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of EPOCH:VALUE: write it as {example}")
        if found and int(epoch) <= max(found):
            raise argparse.ArgumentTypeError(f"{text!r}: the epochs must rise, as in {example}")
        found[int(epoch)] = read(value.strip())
    return found


def _one_of(names: Iterable[str]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(names)}")
        return text

    return read
