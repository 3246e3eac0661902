"""The command line of the runners: one parser for both frameworks, and what it yields."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..activation import Quorum, check_quorum, parse_quorum
from .inject import FORMS, Injector, parse_inject
from .schedule import Schedule

ALGORITHMS = ("allreduce", "eager")
EAGER_ONLY = {"quorum": "solo", "max_staleness": 16, "grace": 0.0}
"""The flags that only `eager` knows, with their defaults; the parser says None for what was not given."""
SGD_ONLY = {"momentum": 0.9, "nesterov": False}


@dataclass(frozen=True)
class Options:
    """A run as the user asked for it, checked, defaults filled in. Times in seconds, lengths in epochs or steps."""

    framework: str
    algorithm: str
    quorum: Quorum | None
    max_staleness: int
    grace: float
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
    momentum: float
    nesterov: bool
    weight_decay: float
    label_smoothing: float
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

    def check_world(self, size: int) -> None:
        """Raise ValueError, with a hint, where the options do not fit a job of `size` ranks."""
        self.injector.check(size)
        if self.quorum is not None:
            check_quorum(self.quorum, size)


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


def build_parser(framework: str) -> argparse.ArgumentParser:
    """The parser alone, for help texts and tests."""
    parser = argparse.ArgumentParser(
        prog="resnet50.py",
        formatter_class=_Help,
        description=f"Train ResNet-50 with {framework} and Horovod, by allreduce or by partial allreduce (eager).",
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
        help="eager: who fires a round: solo, majority, all, a count of ranks, a fraction such as 0.75 (default: solo)",
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
    add("--batch-size", type=_count(1), default=16, metavar="N", help="images per rank and step (default: 16)")
    add("--epochs", type=_count(1), default=16, metavar="N", help="passes over the training images (default: 16)")
    add(
        "--steps",
        type=_count(1),
        metavar="N",
        help="stop for good after N steps of the rank with the most batches, even in mid-epoch; the schedule still "
        "spans --epochs (default: no cap)",
    )
    add("--optimizer", choices=("sgd", "adam", "adamw"), default="sgd", help="(default: sgd)")
    add(
        "--lr",
        type=_number(0, open_=True),
        default=0.05,
        metavar="X",
        help="peak learning rate of the whole job: not scaled by the number of ranks (default: 0.05)",
    )
    add(
        "--warmup-epochs",
        type=_number(0),
        default=0.0,
        metavar="N",
        help="epochs in which the rate rises linearly from a tenth to --lr (default: 0)",
    )
    add(
        "--lr-decay-epochs",
        type=_marks,
        default=(),
        metavar="N,N",
        help="epochs at which the rate falls to a tenth, such as 30,60,80 (default: none)",
    )
    add("--cosine", action="store_true", help="let the rate fall to 0 along half a cosine (default: off)")
    add("--momentum", type=_number(0, below=1), metavar="X", help="of sgd (default: 0.9)")
    add("--nesterov", action=argparse.BooleanOptionalAction, help="Nesterov momentum, of sgd (default: off)")
    add(
        "--weight-decay",
        type=_number(0),
        metavar="X",
        help="of sgd (added to the gradient) and adamw (decoupled), on kernels only: not on biases and batch norm "
        "(default: 0)",
    )
    add("--label-smoothing", type=_number(0, below=1), default=0.0, metavar="X", help="(default: 0)")
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


def _options(framework: str, given: argparse.Namespace) -> Options:
    values = vars(given)
    _settle(values, EAGER_ONLY, given.algorithm == "eager", "--algorithm eager")
    _settle(values, SGD_ONLY, given.optimizer == "sgd", "--optimizer sgd")
    if given.optimizer == "adam" and given.weight_decay is not None:
        raise ValueError("--weight-decay does not go with --optimizer adam: take adamw")
    if given.nesterov and not given.momentum:
        raise ValueError("--nesterov needs a --momentum above 0")
    if given.algorithm == "eager":
        check_quorum(given.quorum, 1_000_000)  # a count is checked against the job's size in check_world
    else:
        values["quorum"] = None
    if given.resume and given.checkpoint_dir is None:
        raise ValueError("--resume needs --checkpoint-dir, the folder that holds the checkpoints")
    is_folder = given.data not in ("digits", "synthetic")
    if is_folder and not Path(given.data).is_dir():
        raise ValueError(
            f"--data {given.data}: there is no such folder; say digits, synthetic, or a folder that holds "
            "train/ and val/"
        )
    if given.data == "synthetic" and given.augment is not None:
        raise ValueError("--augment has nothing to vary in synthetic images: leave it out")
    if not is_folder and given.workers is not None:
        raise ValueError("--workers is for an image folder, --data DIR: leave it out")
    return Options(
        framework=framework,
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
            "weight_decay": given.weight_decay or 0.0,
            "workers": given.workers or 4,
            "augment": given.data != "synthetic" if given.augment is None else given.augment,
            "image_size": given.image_size or (32 if given.data == "digits" else 224),
        },
    )


def _settle(values: dict[str, object], defaults: Mapping[str, object], applies: bool, owner: str) -> None:
    """Fill in the defaults of flags that belong to `owner`; refuse them where they would do nothing."""
    for name, default in defaults.items():
        if values[name] is None:
            values[name] = default
        elif not applies:
            raise ValueError(f"--{name.replace('_', '-')} only means something with {owner}: leave it out")


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
