"""The command line of the training scripts: what reaches the options, and what is refused with a hint."""

import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from hvd_async.algorithms.gossip.config import GossipOptions
from hvd_async.algorithms.leader.config import LeaderOptions
from hvd_async.algorithms.option import options_of
from hvd_async.algorithms.registry import ALGORITHMS, OPTIONS
from hvd_async.runner.options import build_parser, parse
from hvd_async.runtime.launch import HOROVODRUN, TORCHRUN

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_FLAG = {"algorithm", "seed", "arrival_lead", "bucket_cap_mb", "late_cap_mb", "nonfinite", "buffers"}
"""Options that have no flag of their own: two are flags of every run, the others are left at their defaults."""


def test_every_option_of_a_family_is_a_flag_and_every_flag_is_in_the_help():
    parser = build_parser("torch")
    flags = {action.dest for action in parser._actions}
    assert {name for family in OPTIONS.values() for name in options_of(family)} - WITHOUT_FLAG <= flags
    text = parser.format_help()
    assert all(action.option_strings[0] in text for action in parser._actions)


@pytest.mark.parametrize("name", [name for name, one in ALGORITHMS.items() if one.waits_for != "all"])
def test_without_flags_an_optimizer_has_its_defaults(name):
    family = OPTIONS[ALGORITHMS[name].family]
    own = parse("tensorflow", ["--algorithm", name]).own
    assert own == (family(algorithm=name) if "algorithm" in options_of(family) else family())


EVERY_FLAG = (
    "--algorithm eager --quorum 2 --max-staleness 0 --grace 0.01 --weight-prediction 1.5 --weighting samples "
    "--inject linear:0.1 --data . --image-size 64 --no-augment --workers 2 --model small --batch-size 8 --epochs 9 "
    "--steps 5 --optimizer sgd --lr 0.2 --warmup-epochs 1.5 --lr-decay-epochs 3.0,6.0 --momentum 0.8 --nesterov "
    "--weight-decay 0.1 --label-smoothing 0.1 --bn-momentum 0.99 --seed 7 --threads 1 --checkpoint-dir c --resume "
    "--log-dir l --summary s.json --progress bar --eval-every 3 --monitor 5 --pace steps --compression bf16 "
    "--backward-passes-per-step 4 --preset sgp-imagenet --fp16",
    "--algorithm osgp --topology linear --peers 0:1,30:2 --mixing uniform --max-staleness 3 --hierarchical "
    "--average-every 10 --gossip-every 4 --max-local-steps 2 --schedule 0:allreduce,5:osgp,60:adpsgd --bf16",
    "--algorithm diloco --average-every 0:1,5:8 --fragments 2 --outer-lr 0.5 --outer-momentum 0.8 --minutes 2.5",
    "--algorithm sgp --hierarchical-gossip --quasi-global --compression int8 --cosine",
    "--algorithm lsgd --global-period 8 --local-period 4 --local-pull 0.2 --global-pull 0.3 --local-prox 0.05 "
    "--global-prox 0.0 --group 2 --loss-window 5 --lr-spread power",
    "--algorithm easgd --global-period 4 --alpha 0.1 --beta 0.5",
)


def given(line):
    """(name of the option, its value as text) of each flag."""
    for flag, text in re.findall(r"--(\S+)(?: ([^- ]\S*))?", line):
        name = "hierarchical" if flag == "hierarchical-gossip" else flag.removeprefix("no-").replace("-", "_")
        yield name, text or str(not flag.startswith("no-"))


@pytest.mark.parametrize("line", EVERY_FLAG, ids=lambda line: line.split()[1])
def test_every_flag_reaches_the_options_and_changes_no_other_one(line):
    options = parse("torch", line.split())
    family, flags = type(options.own), dict(given(line))
    shown = {
        name: re.sub(r"[ (){}']", "", str(value))
        for name, value in [*vars(options).items(), *vars(options.own).items()]
    }
    assert {name: shown[name] for name in flags} == flags
    others = set(options_of(family)) - flags.keys()
    defaults = family(algorithm=options.algorithm) if "algorithm" in options_of(family) else family()
    assert {name: getattr(options.own, name) for name in others} == {name: getattr(defaults, name) for name in others}
    assert options.settings == asdict(options.own)
    gossips, follows = isinstance(options.own, GossipOptions), isinstance(options.own, LeaderOptions)
    assert (options.gossips, options.follows, options.has_own_weights) == (gossips, follows, gossips or follows)
    assert options.lockstep is False


def test_no_flag_is_missing_from_these():
    known = {action.dest for action in build_parser("torch")._actions} - {"help"}
    assert {name for line in EVERY_FLAG for name, _ in given(line)} == known


def test_what_the_flags_make():
    options = parse("torch", EVERY_FLAG[0].split())
    assert (options.schedule.base, options.schedule.epochs, options.schedule.warmup) == (0.2, 9, 1.5)
    assert (options.schedule.decay_epochs, options.schedule.cosine) == ((3.0, 6.0), False)
    assert (options.injector.delay, options.injector.seed, options.step_images, options.weighted) == (0.1, 7, 32, True)
    assert (options.precision, options.lr_images) == ("fp16", None), "--lr is as given"
    other = parse("torch", ["--bf16", "--pace", "rounds"])
    assert (other.precision, other.by_rounds, other.weighted, other.quorum) == ("bf16", True, False, "majority")
    assert parse("torch", ["--algorithm", "sgp"]).quorum is None


@pytest.mark.parametrize(
    ("line", "size", "of_host", "asked"),
    [
        ("--algorithm lsgd", "4", "4", False),  # one host
        ("--algorithm lsgd --group 4", "4", "2", False),
        ("--algorithm lsgd --group 1", "4", "4", False),
        ("--algorithm lsgd", "4", "1", True),  # the other host may have three
        ("--algorithm lsgd --group 2", "4", "4", True),
        ("--algorithm lsgd", None, None, True),  # another launcher's, which says nothing that is known here
        ("--algorithm easgd", "4", "2", False),
    ],
)
@pytest.mark.parametrize("launcher", [HOROVODRUN, TORCHRUN])
def test_process_sets_are_asked_for_where_there_may_be_several_groups(
    monkeypatch, line, size, of_host, asked, launcher
):
    values = {launcher.rank: "0", launcher.size: size, launcher.local_size: of_host} if size else {}
    monkeypatch.setattr(os, "environ", values)
    assert parse("torch", line.split()).init_settings == ({"process_sets": "dynamic"} if asked else {})


@pytest.mark.parametrize(
    ("preset", "nesterov", "warmup", "lr_images"),
    [("eager-imagenet", False, 5, 256), ("sgp-imagenet", True, 5, 256), ("lsgd-imagenet", False, 0, None)],
)
def test_presets(preset, nesterov, warmup, lr_images):
    options = parse("torch", ["--preset", preset])
    assert (options.nesterov, options.warmup_epochs, options.lr_images) == (nesterov, warmup, lr_images)
    assert (options.optimizer, options.batch_size, options.epochs, options.lr) == ("sgd", 128, 90, 0.1)
    assert (options.momentum, options.weight_decay, options.lr_decay_epochs) == (0.9, 1e-4, (30, 60, 80))
    at_eight = options.at(8)
    assert at_eight.lr == at_eight.schedule.base == pytest.approx(0.4 if lr_images else 0.1)
    assert at_eight.at(8) == at_eight, "scaled once"


def test_a_flag_wins_over_the_preset():
    line = "--preset sgp-imagenet --lr 0.3 --no-nesterov --momentum 0 --batch-size 2 --warmup-epochs 0 --epochs 7"
    options = parse("torch", line.split()).at(8)
    assert (options.lr, options.nesterov, options.momentum, options.batch_size) == (0.3, False, 0.0, 2)
    assert (options.epochs, options.schedule.warmup, options.schedule.decay_epochs) == (7, 0, (30, 60, 80))
    assert parse("torch", ["--preset", "eager-imagenet", "--cosine"]).schedule.decay_epochs == ()
    lars = parse("torch", ["--preset", "eager-imagenet", "--optimizer", "lars"])
    assert (lars.optimizer, lars.momentum, lars.weight_decay) == ("lars", 0.9, 1e-4)


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("--algorithm asgd", "invalid choice"),
        ("--batch-size many", "must be a whole number, got 'many'"),
        ("--lr 0", "above 0"),
        ("--lr-decay-epochs 6,3", "the epochs must rise"),
        ("--inject random:1", "--inject must be none, random:K:SECONDS"),
        ("--algorithm lsgd --beta 0.5", "--beta only means something with --algorithm easgd"),
        ("--algorithm allreduce --quorum solo", "--quorum only means something with --algorithm eager"),
        ("--algorithm sgp --schedule 3:dpsgd --max-staleness 2", "--max-staleness only means something with"),
        ("--algorithm lsgd --local-period 17", "--local-period 17 is above --global-period 16"),
        ("--algorithm dpsgd --schedule 0:allreduce,5:sgp", "never switches to --algorithm dpsgd"),
        ("--algorithm allreduce --compression bf16", "--compression must be none or fp16 with --algorithm allreduce"),
        ("--algorithm sgp --compression int8 --schedule 3:adpsgd", "--compression must be none, fp16 or bf16 with"),
        ("--fp16 --bf16", "pass one"),
        ("--minutes 5 --steps 5", "pass one of them"),
        ("--minutes 5 --resume --checkpoint-dir x", "leave one of them out"),
        ("--optimizer adam --momentum 0.9", "leave it out, or pass sgd or lars"),
        ("--preset sgp-imagenet --momentum 0", "pass --no-nesterov"),
        ("--preset eager-imagenet --epochs 4", "--warmup-epochs must be below the 4 epochs"),
        ("--cosine --lr-decay-epochs 3", "leave one of them out"),
        ("--resume", "--resume needs --checkpoint-dir"),
        ("--data nowhere", "--data must be digits, synthetic or a folder"),
        ("--algorithm allreduce --monitor 5", "pass --algorithm eager --quorum all"),
        ("--data synthetic --augment", "nothing to vary"),
        ("--workers 3", "for an image folder"),
    ],
)
def test_a_wrong_line_is_refused_with_a_hint(capsys, line, hint):
    with pytest.raises(SystemExit) as stopped:
        parse("torch", line.split())
    assert stopped.value.code == 2
    assert hint in capsys.readouterr().err


def test_horovodrun_lets_every_flag_through(monkeypatch):
    # It looks for abbreviations of its own flags even behind the program's name, and dislikes those of several.
    launch = pytest.importorskip("horovod.runner.launch")
    flags = [flag for action in build_parser("torch")._actions for flag in action.option_strings[:1]]
    assert "--hierarchical-gossip" in flags
    command = ["python", "resnet50.py", *flags]
    monkeypatch.setattr("sys.argv", ["horovodrun", "-np", "1", *command])
    assert launch.parse_args().command == command


@pytest.mark.parametrize(("script", "framework"), [("torch_models", "torch"), ("tf_models", "tensorflow")])
def test_help_and_wrong_flags_need_no_framework(script, framework):
    """Importing one takes seconds."""
    code = (
        f"import runpy, sys; sys.modules[{framework!r}] = None; "
        f"runpy.run_path('{script}/resnet50.py', run_name='__main__')"
    )
    for flag, status, said in (("--help", 0, "examples"), ("--quorum=0", 2, "quorum")):
        command = [sys.executable, "-c", code, flag]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == status, done.stderr
        assert said in done.stdout + done.stderr
