"""The flags of the runners, one parser for both frameworks, with their help; what they yield is checked elsewhere.

Flags say None where they were not given, so that a preset can tell.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hvd_async.algorithms.eager.quorum import parse_quorum
from hvd_async.algorithms.leader.selection import SPREADS
from hvd_async.mixing import SCHEMES
from hvd_async.topology import NAMED, WITH_PEERS

from .presets import PRESETS, help_text
from .readers import count, group, marks, number, peers, switches
from .stragglers import FORMS

GOSSIP = ("sgp", "osgp", "dpsgd", "adpsgd")
LEADER = ("lsgd", "easgd")
ALGORITHMS = ("allreduce", "eager", *GOSSIP, *LEADER)
PHASES = ("allreduce", *GOSSIP)
"""The algorithms between which a gossiping run can switch; allreduce averages weights over all ranks at each step."""
OPTIMIZERS = ("sgd", "adam", "adamw", "lars")


def build_parser(framework: str) -> argparse.ArgumentParser:
    """The parser alone, for help texts and tests."""
    parser = argparse.ArgumentParser(
        prog="resnet50.py",
        formatter_class=_Help,
        description=f"Train ResNet-50 with {framework} and Horovod: by allreduce, by partial allreduce (eager), by "
        "gossip (sgp, osgp, dpsgd, adpsgd), or after a leader (lsgd, easgd). A flag that is given wins over what "
        "--preset sets.",
        epilog="example: horovodrun -np 4 --gloo python resnet50.py --algorithm eager --quorum majority --data digits "
        "--image-size 32 --optimizer adam --lr 0.001 --cosine --inject random:1:0.3 --summary out.json",
    )
    _algorithm_flags(parser)
    _gossip_flags(parser)
    _leader_flags(parser)
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
        help="allreduce: Horovod's synchronous SGD; eager: rounds that do not wait for late ranks; gossip, in which "
        "a rank mixes its weights with those of a few others: sgp waits for their messages, osgp takes them in up to "
        "--max-staleness steps later, dpsgd wants a symmetric graph, adpsgd averages with whichever neighbour is "
        "ready; and ranks that train by themselves and are pulled now and then: lsgd towards whoever has the lowest "
        "training loss, easgd towards a centre (default: eager)",
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
        type=count(0),
        metavar="N",
        help="eager: how many rounds late a gradient may be, 0 is synchronous (default: 16); osgp: how many steps late "
        "a message may be, 0 is sgp (default: 1)",
    )
    add(
        "--grace",
        type=number(0),
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
        type=peers,
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
        type=count(0),
        metavar="N",
        help="of sgp, osgp and dpsgd: average the weights of all ranks every N steps; 0 is never (default: 0)",
    )
    add(
        "--max-local-steps",
        type=count(1),
        metavar="N",
        help="of adpsgd: steps that a rank may take between two averagings, before it waits for one (default: 4)",
    )
    add(
        "--schedule",
        type=switches(PHASES),
        dest="switches",
        metavar="E:NAME,...",
        help="the algorithm from epoch E on: 0:allreduce,5:sgp is allreduce in epochs 0 to 4, then sgp "
        "(default: --algorithm in all epochs)",
    )


def _leader_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("leaders").add_argument
    add(
        "--global-period",
        type=count(1),
        metavar="N",
        help="steps of each rank, on the average, between two pulls of all ranks towards the leader or the centre "
        "(default: 16)",
    )
    add(
        "--local-period",
        type=count(1),
        metavar="N",
        help="of lsgd: the same between two pulls of a group towards its leader (default: a quarter of "
        "--global-period)",
    )
    for flag, what in (
        ("--local-pull", "of lsgd: how far a rank is pulled towards the leader of its group"),
        ("--global-pull", "of lsgd: and towards that of all"),
        ("--local-prox", "of lsgd: how far the steps of a --local-period together pull it, between these pulls"),
        ("--global-prox", "of lsgd: and those of a --global-period towards the leader of all"),
    ):
        add(flag, type=number(0, below=1), metavar="X", help=f"{what}; 0 is not at all, 1 all the way (default: 0.1)")
    add(
        "--group",
        type=group,
        metavar="host|N",
        help="of lsgd: the ranks of a host, or N ranks, have a leader of their own (default: host)",
    )
    add("--loss-window", type=count(1), metavar="N", help="of lsgd: losses that count in the choice (default: 10)")
    add("--beta", type=number(0, below=1), metavar="X", help="of easgd: how far the centre moves (default: 0.43)")
    add(
        "--alpha",
        type=number(0, below=1),
        metavar="X",
        help="of easgd: how far a rank is pulled towards the centre (default: --beta over the number of ranks)",
    )
    add(
        "--lr-spread",
        choices=SPREADS,
        help="ranks have learning rates of their own: linear: rank i's is i + 1 times --lr, power: 2^i times "
        "(default: none)",
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
