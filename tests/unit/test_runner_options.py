from dataclasses import asdict
from pathlib import Path

import pytest

from hvd_async.algorithms.eager.config import EagerOptions
from hvd_async.algorithms.gossip.config import GossipOptions
from hvd_async.algorithms.leader.config import LeaderOptions
from hvd_async.algorithms.option import options_of
from hvd_async.algorithms.registry import ALGORITHMS, OPTIONS
from hvd_async.runner.options import build_parser, parse

WITHOUT_FLAG = {"algorithm", "seed", "bucket_cap_mb", "late_cap_mb", "nonfinite", "buffers"}
"""Options that have no flag of their own: two are flags of every run, the others are left at their defaults."""


def refusal(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        parse("torch", arguments)
    assert stopped.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("family", OPTIONS)
def test_every_option_of_a_family_is_a_flag(family):
    flags = {action.dest for action in build_parser("torch")._actions}
    assert set(options_of(OPTIONS[family])) - WITHOUT_FLAG <= flags


@pytest.mark.parametrize(
    ("algorithm", "own"),
    [
        ("eager", EagerOptions()),
        *((name, GossipOptions(name)) for name, one in ALGORITHMS.items() if one.waits_for != "all" and
          one.family == "gossip"),
        *((name, LeaderOptions(name)) for name, one in ALGORITHMS.items() if one.family == "leader"),
    ],
)  # fmt: skip
def test_without_flags_an_optimizer_has_its_defaults(algorithm, own):
    options = parse("tensorflow", ["--algorithm", algorithm])
    assert options.own == own
    assert options.settings == asdict(own)
    assert options.lockstep is False


def test_defaults():
    options = parse("torch", [])
    assert (options.framework, options.algorithm, options.own) == ("torch", "eager", EagerOptions())
    assert (options.data, options.image_size, options.augment, options.lockstep) == ("digits", 32, True, False)
    assert (options.momentum, options.nesterov, options.injector.kind) == (0.9, False, "none")


def test_allreduce_has_no_optimizer_of_ours_and_runs_in_lockstep():
    options = parse("tensorflow", ["--algorithm", "allreduce", "--data", "synthetic"])
    assert (options.own, options.settings, options.init_settings) == (None, {}, {})
    assert (options.quorum, options.lockstep, options.by_rounds) == (None, True, False)
    assert (options.image_size, options.augment) == (224, False)


@pytest.mark.parametrize(
    ("text", "quorum"), [("majority", "majority"), ("auto", "auto"), ("3", 3), ("0.75", 0.75), ("all", "all")]
)
def test_quorums(text, quorum):
    value = parse("torch", ["--quorum", text]).quorum
    assert value == quorum
    assert type(value) is type(quorum)


def test_everything_reaches_the_options(tmp_path):
    line = (
        f"--algorithm eager --quorum 2 --max-staleness 0 --grace 0.01 --weight-prediction 1.5 --weighting samples "
        f"--inject linear:0.1 --data {tmp_path} "
        "--image-size 64 --no-augment --workers 2 --model small --batch-size 8 --epochs 9 --steps 5 --optimizer sgd "
        "--lr 0.2 --warmup-epochs 1.5 --lr-decay-epochs 3,6 --momentum 0.8 --nesterov --weight-decay 0.1 "
        "--label-smoothing 0.1 --bn-momentum 0.99 --seed 7 --threads 1 --checkpoint-dir c --resume --log-dir l "
        "--summary s.json --progress bar --eval-every 3 --monitor 5 --pace steps --compression bf16 "
        "--backward-passes-per-step 4 --preset sgp-imagenet --fp16"
    )
    options = parse("torch", line.split())
    given = {flag[2:].replace("-", "_") for flag in line.split() if flag.startswith("--")}
    known = {action.dest for action in build_parser("torch")._actions} - {"help", "cosine", "bf16", "minutes"}
    others = {name for family in (GossipOptions, LeaderOptions) for name in options_of(family)} - WITHOUT_FLAG
    assert {name.removeprefix("no_") for name in given} | others == known, "a flag is missing from this test"
    assert options.own == EagerOptions(
        quorum=2, max_staleness=0, grace=0.01, weight_prediction=1.5, weighting="samples", seed=7, pace="steps"
    )
    assert (options.workers, options.augment) == (2, False)
    assert (options.schedule.base, options.schedule.epochs, options.schedule.warmup) == (0.2, 9, 1.5)
    assert (options.schedule.decay_epochs, options.schedule.cosine) == ((3.0, 6.0), False)
    assert (options.momentum, options.nesterov, options.weight_decay, options.bn_momentum) == (0.8, True, 0.1, 0.99)
    assert (options.injector.delay, options.injector.seed, options.seed, options.threads) == (0.1, 7, 7, 1)
    assert (options.checkpoint_dir, options.resume, options.log_dir) == (Path("c"), True, Path("l"))
    assert (options.summary, options.progress, options.eval_every, options.monitor) == (Path("s.json"), "bar", 3, 5)
    assert (options.steps, options.label_smoothing, options.batch_size) == (5, 0.1, 8)
    assert (options.compression, options.passes, options.step_images) == ("bf16", 4, 32)
    assert parse("torch", ["--pace", "rounds"]).by_rounds
    assert (options.precision, options.lr_images, options.optimizer) == ("fp16", None, "sgd"), "--lr is as given"


def test_every_flag_of_gossip_reaches_the_optimizer():
    line = (
        "--algorithm osgp --topology linear --peers 0:1,30:2 --mixing uniform --max-staleness 3 --hierarchical "
        "--average-every 10 --gossip-every 4 --max-local-steps 2 --schedule 0:allreduce,5:osgp,60:adpsgd"
    )
    options = parse("torch", line.split())
    assert options.own == GossipOptions(
        algorithm="osgp",
        topology="linear",
        peers={0: 1, 30: 2},
        mixing="uniform",
        max_staleness=3,
        hierarchical=True,
        max_local_steps=2,
        average_every=10,
        gossip_every=4,
        schedule={0: "allreduce", 5: "osgp", 60: "adpsgd"},
    )
    assert (options.quorum, options.by_rounds, options.gossips, options.follows) == (None, False, True, False)


def test_flags_of_outer_optimizers_reach_the_optimizer():
    line = "--average-every 0:1,5:8 --fragments 2 --outer-lr 0.5 --outer-momentum 0.8 --max-staleness 2"
    options = parse("torch", ["--algorithm", "diloco", *line.split()])
    assert options.own == GossipOptions(
        "diloco", average_every={0: 1, 5: 8}, fragments=2, outer_lr=0.5, outer_momentum=0.8, max_staleness=2
    )
    assert (options.lockstep, options.gossips) == (False, True)
    assert parse("torch", ["--algorithm", "local", "--compression", "int8"]).compression == "int8"


@pytest.mark.parametrize("algorithm", ["sgp", "osgp", "dpsgd"])
@pytest.mark.parametrize("flag", ["--hierarchical", "--hierarchical-gossip"])
def test_hosts_gossip_compressed_and_average_all_ranks(algorithm, flag):
    line = ["--algorithm", algorithm, flag, "--compression", "int8", "--average-every", "10"]
    for framework in ("torch", "tensorflow"):
        options = parse(framework, line)
        assert options.own == GossipOptions(algorithm=algorithm, hierarchical=True, average_every=10)
        assert options.compression == "int8"


def test_every_flag_of_leaders_reaches_the_optimizer(monkeypatch):
    monkeypatch.setenv("HOROVOD_SIZE", "4")
    line = (
        "--algorithm lsgd --global-period 8 --local-period 4 --local-pull 0.2 --global-pull 0.3 --local-prox 0.05 "
        "--global-prox 0 --group 2 --loss-window 5 --lr-spread power"
    )
    options = parse("torch", line.split())
    assert options.own == LeaderOptions("lsgd", 4, 8, 0.2, 0.3, 0.05, 0.0, group=2, loss_window=5, lr_spread="power")
    assert (options.follows, options.apart, options.gossips, options.lockstep) == (True, True, False, False)
    assert options.init_settings == {"process_sets": "dynamic"}, "a group of ranks needs a process set"
    elastic = parse("tensorflow", ["--algorithm", "easgd", "--global-period", "4", "--alpha", "0.1", "--beta", "0.5"])
    assert elastic.own == LeaderOptions("easgd", global_period=4, alpha=0.1, beta=0.5)
    assert elastic.init_settings == {}
    assert parse("torch", ["--algorithm", "lsgd", "--group", "host"]).own.group == "host"


@pytest.mark.parametrize(
    ("group", "size", "of_host", "asked"),
    [
        ((), "4", "4", False),  # one host
        (("--group", "host"), "4", "4", False),
        (("--group", "4"), "4", "2", False),
        (("--group", "1"), "4", "4", False),
        ((), "4", "2", True),
        ((), "4", "1", True),  # the other host may have three
        (("--group", "2"), "4", "4", True),
        ((), None, None, True),  # another launcher's, which says nothing that is known here
        (("--group", "4"), None, None, True),
    ],
)
def test_process_sets_are_asked_for_where_there_may_be_several_groups(monkeypatch, group, size, of_host, asked):
    for name, value in (("HOROVOD_SIZE", size), ("HOROVOD_LOCAL_SIZE", of_host)):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    options = parse("torch", ["--algorithm", "lsgd", *group])
    assert options.init_settings == ({"process_sets": "dynamic"} if asked else {})


@pytest.mark.parametrize(
    ("line", "known"),
    [
        ("sgp --schedule 3:osgp --max-staleness 2", True),
        ("sgp --schedule 3:dpsgd --max-staleness 2", False),
        ("dpsgd --schedule 3:adpsgd --max-local-steps 2", True),
        ("adpsgd --mixing metropolis", False),
        ("adpsgd --hierarchical", True),
        ("allreduce --hierarchical", False),
        ("adpsgd --average-every 2", False),
        ("adpsgd --mixing metropolis --schedule 0:dpsgd,4:adpsgd", True),
    ],
)
def test_a_flag_may_be_that_of_any_algorithm_of_the_schedule(capsys, line, known):
    arguments = ["--algorithm", *line.split()]
    if known:
        assert parse("torch", arguments)
    else:
        assert "only means something with" in refusal(capsys, *arguments)


def test_precision():
    assert [parse("torch", line.split()).precision for line in ("", "--fp16", "--bf16")] == ["fp32", "fp16", "bf16"]


RECIPE = {"batch_size": 128, "epochs": 90, "momentum": 0.9, "weight_decay": 1e-4, "optimizer": "sgd", "lr": 0.1}


@pytest.mark.parametrize(
    ("preset", "nesterov", "warmup", "lr_images"),
    [("eager-imagenet", False, 5, 256), ("sgp-imagenet", True, 5, 256), ("lsgd-imagenet", False, 0, None)],
)
def test_presets(preset, nesterov, warmup, lr_images):
    options = parse("torch", ["--preset", preset])
    assert {name: getattr(options, name) for name in RECIPE} == RECIPE
    assert (options.nesterov, options.schedule.warmup, options.lr_images) == (nesterov, warmup, lr_images)
    assert options.schedule.decay_epochs == (30, 60, 80)
    at_eight = options.at(8)
    assert at_eight.lr == at_eight.schedule.base == pytest.approx(0.4 if lr_images else 0.1)
    assert at_eight.at(8) == at_eight, "scaled once"


def test_a_flag_wins_over_the_preset():
    line = "--preset sgp-imagenet --lr 0.3 --no-nesterov --momentum 0 --batch-size 2 --warmup-epochs 0 --epochs 7"
    options = parse("torch", line.split()).at(8)
    assert (options.lr, options.nesterov, options.momentum, options.batch_size) == (0.3, False, 0.0, 2)
    assert (options.epochs, options.schedule.warmup, options.schedule.decay_epochs) == (7, 0, (30, 60, 80))
    assert parse("torch", ["--preset", "eager-imagenet", "--cosine"]).schedule.decay_epochs == ()
    adam = parse("torch", ["--preset", "sgp-imagenet", "--optimizer", "adam"])
    assert (adam.optimizer, adam.nesterov, adam.weight_decay) == ("adam", False, 0.0)
    lars = parse("torch", ["--preset", "eager-imagenet", "--optimizer", "lars"])
    assert (lars.optimizer, lars.momentum, lars.weight_decay) == ("lars", 0.9, 1e-4)


INT8 = "for sgp, osgp, dpsgd, exact-diffusion, noloco, local, slowmo or diloco"


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("--algorithm asgd", "invalid choice"),
        ("--algorithm lsgd --beta 0.5", "--beta only means something with --algorithm easgd"),
        ("--algorithm easgd --local-pull 0.5", "--local-pull only means something with --algorithm lsgd"),
        ("--algorithm sgp --lr-spread linear", "--lr-spread only means something with --algorithm lsgd or easgd"),
        ("--algorithm lsgd --local-period 17", "--local-period 17 is above --global-period 16"),
        ("--pace rounds --quorum all", "take --pace steps, or a quorum that does not wait for all"),
        ("--algorithm lsgd --global-period 0", "0 is too small"),
        ("--algorithm lsgd --global-pull 1", "1 must be at least 0 and below 1"),
        ("--algorithm lsgd --group hosts", "'hosts' is not a whole number"),
        ("--algorithm lsgd --compression fp16", "weights travel as they are"),
        ("--quorum most", 'take "solo"'),
        ("--quorum 0", "cannot be"),
        ("--quorum 1.5", "fraction in"),
        ("--max-staleness -1", "give 0 or more"),
        ("--grace -1", "must be at least 0"),
        ("--grace nan", "must be at least 0"),
        ("--lr 0", "must be above 0"),
        ("--batch-size 0", "give 1 or more"),
        ("--batch-size many", "not a whole number"),
        ("--momentum 1", "below 1"),
        ("--algorithm allreduce --quorum solo", "--quorum only means something with --algorithm eager"),
        ("--algorithm allreduce --max-staleness 0", "--max-staleness only means something with --algorithm eager"),
        ("--algorithm allreduce --pace rounds", "--pace only means something with --algorithm eager"),
        ("--algorithm allreduce --compression bf16", "take fp16, or --algorithm eager --quorum all"),
        ("--compression zip", "invalid choice"),
        ("--compression int8", INT8),
        ("--algorithm allreduce --compression int8", "take fp16"),
        ("--algorithm adpsgd --compression int8", INT8),
        ("--algorithm sgp --compression int8 --schedule 3:adpsgd", INT8),
        ("--algorithm sgp --quorum solo", "--quorum only means something with --algorithm eager"),
        ("--algorithm sgp --pace rounds", "--pace only means something with --algorithm eager"),
        (
            "--algorithm sgp --max-staleness 1",
            "only means something with --algorithm eager, osgp, local, slowmo or",
        ),
        ("--algorithm sgp --max-local-steps 3", "only means something with --algorithm adpsgd"),
        (
            "--topology ring",
            "--topology only means something with --algorithm sgp, osgp, dpsgd, adpsgd, exact-diffusion or noloco",
        ),
        ("--algorithm allreduce --peers 2", "--peers only means something with --algorithm sgp"),
        ("--algorithm lsgd --hierarchical", "--hierarchical only means something with --algorithm eager, sgp"),
        ("--average-every 3", "--average-every only means something with --algorithm sgp"),
        ("--algorithm allreduce --schedule 5:sgp", "--schedule only means something with --algorithm sgp"),
        ("--algorithm dpsgd --schedule 0:allreduce,5:sgp", "never comes to --algorithm dpsgd"),
        ("--algorithm sgp --schedule allreduce", "write it as 0:allreduce,5:sgp"),
        ("--algorithm sgp --schedule 0:allreduce,soon:sgp", "write it as 0:allreduce,5:sgp"),
        ("--algorithm sgp --schedule 0:eager", "'eager' is not one of allreduce, sgp"),
        ("--algorithm sgp --schedule 5:sgp,0:allreduce", "the epochs must rise"),
        ("--algorithm sgp --topology torus", "invalid choice"),
        ("--algorithm sgp --mixing equal", "invalid choice"),
        ("--algorithm sgp --peers 0", "give 1 or more"),
        ("--algorithm sgp --peers many", "not a whole number"),
        ("--algorithm sgp --peers 0:1,30", "write it as 0:1,30:2"),
        ("--algorithm sgp --peers 0:1,30:0", "give 1 or more"),
        ("--algorithm sgp --peers 30:2", "begin with 0:"),
        ("--algorithm sgp --peers 0:1,0:2", "the epochs must rise"),
        ("--algorithm sgp --average-every -1", "give 0 or more"),
        ("--algorithm adpsgd --max-local-steps 0", "give 1 or more"),
        ("--pace walk", "invalid choice"),
        ("--preset imagenet", "invalid choice"),
        ("--backward-passes-per-step 0", "give 1 or more"),
        ("--fp16 --bf16", "take one"),
        ("--optimizer adam --momentum 0.9", "leave it out, or take sgd or lars"),
        ("--optimizer lars --nesterov", "leave it out, or take sgd"),
        ("--optimizer adam --weight-decay 0.1", "leave it out, or take sgd or adamw or lars"),
        ("--preset sgp-imagenet --momentum 0", "say --no-nesterov"),
        ("--preset eager-imagenet --epochs 4", "lower --warmup-epochs or raise --epochs"),
        ("--momentum 0 --nesterov", "--momentum above 0"),
        ("--cosine --lr-decay-epochs 3", "not both"),
        ("--lr-decay-epochs 6,3", "and rise"),
        ("--lr-decay-epochs soon", "write 30,60,80"),
        ("--warmup-epochs 16", "must be shorter"),
        ("--resume", "--resume needs --checkpoint-dir"),
        ("--data nowhere", "no such folder"),
        ("--algorithm allreduce --monitor 5", "take --algorithm eager --quorum all"),
        ("--data synthetic --augment", "nothing to vary"),
        ("--workers 3", "for an image folder"),
        ("--inject random:1", "say none, random:K:SECONDS"),
    ],
)
def test_a_wrong_line_says_how_to_mend_it(capsys, line, hint):
    assert hint in refusal(capsys, *line.split())


def test_what_does_not_fit_the_number_of_ranks():
    parse("torch", ["--quorum", "9"]).at(9)
    with pytest.raises(ValueError, match="quorum=9 of 4 ranks"):
        parse("torch", ["--quorum", "9"]).at(4)
    with pytest.raises(ValueError, match="start at least 3 ranks"):
        parse("torch", ["--inject", "random:3:0.1"]).at(2)


def test_horovodrun_lets_every_flag_through(monkeypatch):
    # It looks for abbreviations of its own flags even behind the program's name, and dislikes those of several.
    launch = pytest.importorskip("horovod.runner.launch")
    flags = [flag for action in build_parser("torch")._actions for flag in action.option_strings[:1]]
    assert "--hierarchical-gossip" in flags
    command = ["python", "resnet50.py", *flags]
    monkeypatch.setattr("sys.argv", ["horovodrun", "-np", "1", *command])
    assert launch.parse_args().command == command


def test_help_names_every_flag_with_its_default():
    for group in build_parser("torch")._action_groups[2:]:
        for action in group._group_actions:
            if action.nargs != 0 or action.default is not False:
                assert action.help, action.option_strings
                if action.dest != "resume":
                    assert "default" in action.help, f"{action.option_strings} hides its default"
    assert "--max-staleness" in build_parser("torch").format_help()


def test_a_quorum_that_is_none_is_told_what_there_is(capsys):
    with pytest.raises(SystemExit):
        parse("torch", ["--quorum", "half"])
    said = " ".join(capsys.readouterr().err.split())
    assert 'take "solo", "majority", "all", "auto", a number of ranks from 1, or a fraction such as 0.75' in said
