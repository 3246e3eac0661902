from pathlib import Path

import pytest

from hvd_async.runner.options import build_parser, parse


def refusal(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        parse("torch", arguments)
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_defaults():
    options = parse("torch", [])
    assert (options.framework, options.algorithm, options.quorum, options.max_staleness) == (
        "torch",
        "eager",
        "solo",
        16,
    )
    assert (options.data, options.image_size, options.augment, options.lockstep) == ("digits", 32, True, False)
    assert (options.momentum, options.nesterov, options.injector.kind) == (0.9, False, "none")


def test_allreduce_has_no_quorum_and_runs_in_lockstep():
    options = parse("tensorflow", ["--algorithm", "allreduce", "--data", "synthetic"])
    assert (options.quorum, options.lockstep, options.image_size, options.augment) == (None, True, 224, False)


@pytest.mark.parametrize(("text", "quorum"), [("majority", "majority"), ("3", 3), ("0.75", 0.75), ("all", "all")])
def test_quorums(text, quorum):
    value = parse("torch", ["--quorum", text]).quorum
    assert value == quorum
    assert type(value) is type(quorum)


def test_everything_reaches_the_options(tmp_path):
    line = (
        f"--algorithm eager --quorum 2 --max-staleness 0 --grace 0.01 --inject linear:0.1 --data {tmp_path} "
        "--image-size 64 --no-augment --workers 2 --model small --batch-size 8 --epochs 9 --steps 5 --optimizer sgd "
        "--lr 0.2 --warmup-epochs 1.5 --lr-decay-epochs 3,6 --momentum 0.8 --nesterov --weight-decay 0.1 "
        "--label-smoothing 0.1 --bn-momentum 0.99 --seed 7 --threads 1 --checkpoint-dir c --resume --log-dir l "
        "--summary s.json --progress bar --eval-every 3"
    )
    options = parse("torch", line.split())
    given = {flag[2:].replace("-", "_") for flag in line.split() if flag.startswith("--")}
    known = {action.dest for action in build_parser("torch")._actions} - {"help", "cosine"}
    assert {name.removeprefix("no_") for name in given} == known, "a flag is missing from this test"
    assert (options.max_staleness, options.grace, options.workers, options.augment) == (0, 0.01, 2, False)
    assert (options.schedule.base, options.schedule.epochs, options.schedule.warmup) == (0.2, 9, 1.5)
    assert (options.schedule.decay_epochs, options.schedule.cosine) == ((3.0, 6.0), False)
    assert (options.momentum, options.nesterov, options.weight_decay, options.bn_momentum) == (0.8, True, 0.1, 0.99)
    assert (options.injector.delay, options.injector.seed, options.seed, options.threads) == (0.1, 7, 7, 1)
    assert (options.checkpoint_dir, options.resume, options.log_dir) == (Path("c"), True, Path("l"))
    assert (options.summary, options.progress, options.eval_every) == (Path("s.json"), "bar", 3)
    assert (options.steps, options.label_smoothing, options.batch_size) == (5, 0.1, 8)


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("--algorithm sgp", "invalid choice"),
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
        ("--optimizer adam --momentum 0.9", "--momentum only means something with --optimizer sgd"),
        ("--optimizer adam --weight-decay 0.1", "take adamw"),
        ("--momentum 0 --nesterov", "--momentum above 0"),
        ("--cosine --lr-decay-epochs 3", "not both"),
        ("--lr-decay-epochs 6,3", "and rise"),
        ("--lr-decay-epochs soon", "write 30,60,80"),
        ("--warmup-epochs 16", "must be shorter"),
        ("--resume", "--resume needs --checkpoint-dir"),
        ("--data nowhere", "no such folder"),
        ("--data synthetic --augment", "nothing to vary"),
        ("--workers 3", "for an image folder"),
        ("--inject random:1", "say none, random:K:SECONDS"),
    ],
)
def test_a_wrong_line_says_how_to_mend_it(capsys, line, hint):
    assert hint in refusal(capsys, *line.split())


def test_what_does_not_fit_the_number_of_ranks():
    parse("torch", ["--quorum", "9"]).check_world(9)
    with pytest.raises(ValueError, match="quorum=9 of 4 ranks"):
        parse("torch", ["--quorum", "9"]).check_world(4)
    with pytest.raises(ValueError, match="start at least 3 ranks"):
        parse("torch", ["--inject", "random:3:0.1"]).check_world(2)


def test_help_names_every_flag_with_its_default():
    for group in build_parser("torch")._action_groups[2:]:
        for action in group._group_actions:
            if action.nargs != 0 or action.default is not False:
                assert action.help, action.option_strings
                if action.dest != "resume":
                    assert "default" in action.help, f"{action.option_strings} hides its default"
    assert "--max-staleness" in build_parser("torch").format_help()
