"""The flags of the runners, one parser for both frameworks, with their help; what they yield is checked elsewhere.

Flags say None where they were not given, so that a preset can tell.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from ..activation import parse_quorum
from .inject import FORMS
from .presets import PRESETS, help_text

ALGORITHMS = ("allreduce", "eager")
OPTIMIZERS = ("sgd", "adam", "adamw", "lars")


def build_parser(framework: str) -> argparse.ArgumentParser:
    """The parser alone, for help texts and tests."""
    parser = argparse.ArgumentParser(
        prog="resnet50.py",
        formatter_class=_Help,
        description=f"Train ResNet-50 with {framework} and Horovod, by allreduce or by partial allreduce (eager). "
        "A flag that is given wins over what --preset sets.",
        epilog="example: horovodrun -np 4 --gloo python resnet50.py --algorithm eager --quorum majority --data digits "
        "--image-size 32 --optimizer adam --lr 0.001 --cosine --inject random:1:0.3 --summary out.json",
    )
    _algorithm_flags(parser)
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
        help="allreduce: Horovod's synchronous SGD; eager: rounds that do not wait for late ranks (default: eager)",
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
        help="eager: how many rounds late a gradient may be; 0 is synchronous (default: 16)",
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
        choices=("none", "fp16", "bf16"),
        default="none",
        help="how gradients travel; allreduce knows none and fp16 (default: none)",
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
        "--checkpoint-dir", type=Path, metavar="DIR", help="keep the last and the best checkpoint there (default: none)"
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
