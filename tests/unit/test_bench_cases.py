"""What the benchmarks' cases make of the blocks that their jobs bring home."""

from __future__ import annotations

import argparse
import importlib.util
import pathlib

import numpy as np
import pytest

from scripts.benchmarks.cases import accuracy, activation, memory, no_stragglers, skew, soak, straggler
from scripts.benchmarks.support import timed, trainings
from scripts.benchmarks.support.launch import Progress, repetitions
from scripts.benchmarks.support.report import Report
from scripts.benchmarks.support.schedule import linear, one_random

RANKS, STEPS = 4, 10
BENCH = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "bench.py"


def block(arm, seconds, *, delay=0.1, repetition=0, waited=0.0, staleness=None, contributors=None, held=None):
    """A block of ``jobs/timed.py`` in which every rank took ``seconds`` a step."""
    stats = {}
    if staleness is not None:
        stats = {"staleness": staleness, "contributors": contributors or {"4": STEPS}, "held_s": held or [0.0] * RANKS}
    own = {"elapsed": seconds * STEPS, "waited": waited * STEPS, "stats": stats, "rounds_before": 0, "identical": True}
    setting = {"delay": delay, "steps": STEPS, "arm": arm, "repetition": repetition, "seed": repetition}
    return {**setting, "by_rank": [own] * RANKS}


def test_arms_alternate():
    order = repetitions(["a", "b", "c"], 3)
    assert order == [(0, "a"), (0, "b"), (0, "c"), (1, "b"), (1, "c"), (1, "a"), (2, "c"), (2, "a"), (2, "b")]


def test_blocks_have_every_arm_in_every_setting():
    times = one_random(STEPS, RANKS, 0.1, 0.1, 0)
    blocks = timed.blocks_of(["horovod", "solo"], [({"delay": 0.1}, times), ({"delay": 0.2}, times)], 3, barrier=False)
    assert len(blocks) == 12
    assert {(b["arm"], b["delay"], b["repetition"]) for b in blocks} == {
        (arm, delay, i) for arm in ("horovod", "solo") for delay in (0.1, 0.2) for i in range(3)
    }


def test_figures_of_a_block():
    found = block(
        "solo", 0.5, waited=0.1, staleness={"0": 3, "1": 1}, contributors={"1": 9, "2": 1}, held=[4.0, 0, 0, 0]
    )
    assert timed.step_seconds(found) == 0.5
    assert timed.wait_seconds(found) == pytest.approx(0.1)
    assert timed.fresh_per_second(found) == pytest.approx(3 * RANKS / 5.0)
    assert timed.mean_staleness(found) == 0.25
    assert timed.mean_contributors(found) == pytest.approx(1.1)
    assert timed.held_seconds(found) == pytest.approx(0.1)
    assert timed.fresh_per_second(block("horovod", 0.5)) == pytest.approx(RANKS * STEPS / 5.0)


def straggler_rows(horovod, solo):
    times = one_random(STEPS, RANKS, 0.1, 0.1, 0)
    blocks = [block("horovod", h, repetition=i) for i, h in enumerate(horovod)]
    blocks += [block("solo", s, repetition=i, staleness={"0": 5}) for i, s in enumerate(solo)]
    setting = {"delay": 0.1, "compute": 0.1, "steps": STEPS, "schedule_seed": 0}
    return straggler.rows_of(blocks, setting, times), times


def test_straggler_rows_and_goals():
    rows, times = straggler_rows([0.21, 0.20, 0.22], [0.15, 0.14, 0.16])
    horovod, solo = rows
    assert (horovod["value"], horovod["low"], horovod["high"]) == pytest.approx((0.21, 0.20, 0.22))
    assert solo["speedup"] == pytest.approx(0.21 / 0.15)
    assert solo["bound"] == pytest.approx(times.max(axis=1).sum() / times.sum(axis=0).max())
    assert solo["of_bound"] == pytest.approx(solo["speedup"] / solo["bound"])
    report = Report("straggler", RANKS, rows, straggler.COLUMNS)
    straggler.judge(report, rows, "0.1 s")
    assert horovod["machine_too_busy"] is False
    assert not report.notes
    assert "horovod" in report.text()


def test_straggler_says_when_the_machine_was_too_busy():
    rows, _ = straggler_rows([0.3] * 3, [0.15] * 3)
    report = Report("straggler", RANKS, rows, straggler.COLUMNS)
    straggler.judge(report, rows, "0.1 s")
    assert all(row["machine_too_busy"] for row in rows)
    assert "too busy" in report.notes[0]


def test_auto_is_judged_by_the_best_fixed_quorum():
    report = Report("skew", RANKS, [], ())
    timed.judge_auto(report, {"horovod": 90.0, "solo": 10.0, "k3": 20.0, "auto": 19.0}, ", x")
    timed.judge_auto(report, {"solo": 10.0})
    timed.judge_auto(report, {"auto": 10.0, "horovod": 1.0})
    [goal] = report.goals
    assert goal.what == "auto's fresh gradients a second against k3's, x"
    assert (goal.value, goal.wanted, goal.met) == (pytest.approx(0.95), ">= 0.95", goal.value >= 0.95)


def test_skew_rows():
    times = linear(STEPS, RANKS, 0.03)
    blocks = [
        block("horovod", 0.1, waited=0.045),
        block("all", 0.1, waited=0.045, staleness={"0": STEPS}, held=[0.0, 0.0, 0.0, 0.18 * STEPS]),
        block("majority", 0.1, waited=0.02, staleness={"0": 5}, contributors={"2": 5, "3": 5}, held=[0.8, 0, 0, 0]),
    ]
    rows = skew.rows_of(blocks, {"delay": 0.03, "steps": STEPS}, times)
    assert rows[1]["until_fired_ms"] == pytest.approx(45)
    assert rows[1]["replayed_ms"] == pytest.approx(45)
    assert rows[2]["speedup"] == pytest.approx(2.25)
    assert rows[2]["contributors"] == 2.5
    report = Report("skew", RANKS, rows, skew.COLUMNS)
    skew.judge(report)
    by_what = {goal.what: goal for goal in report.goals}
    assert by_what["wait of all over majority, until the result is there"].value == pytest.approx(2.25)
    assert by_what["majority's ranks in a round over (P+1)/2"].met


def test_balanced_rows_compare_within_a_cycle():
    def one(arm, cycle, seconds):
        own = {"elapsed": 4 * seconds, "steps": 4, "fresh": 4}
        return {"arm": arm, "cycle": cycle, "by_rank": [own, own]}

    blocks = [one(arm, cycle, (1 + cycle) * f) for cycle in range(8) for arm, f in (("horovod", 1.0), ("all", 1.01))]
    rows = no_stragglers.rows_of(blocks, {"framework": "torch"})
    assert rows[1]["ratio"] == pytest.approx(1.01)
    assert rows[1]["ratio_high"] == pytest.approx(1.01)
    assert rows[1]["fresh_per_s"] == pytest.approx(2 * (1 / 4 + 1 / 5) / 2 / 1.01)
    report = Report("balanced", 2, rows, no_stragglers.COLUMNS)
    no_stragglers.judge(report, 0.015)
    assert all(goal.met for goal in report.goals)


def test_activation_takes_the_last_receipt():
    ranks = [{"received": [1.0010, 2.0005], "first": [1.0, 2.0]}, {"received": [1.0005, 2.0007], "first": [1.0, 2.0]}]
    found = {"what": "latency", "busy": False, "rounds": 2, "by_rank": ranks}
    assert activation.last_receipts(found) == pytest.approx([0.0010, 0.0007])
    [row] = activation.rows_of([found])
    assert row["value"] == pytest.approx(0.85)


def test_memory_looks_at_the_rank_nearest_to_its_limit():
    common = {"resident": 1.0, "after": 0.0, "serving_most": 1.0, "keeps": 0.0, "left": False}
    ranks = [{"peak": 5.0, "waiting": 4, **common}, {"peak": 3.5, "waiting": 1, **common, "left": True}]
    [row] = memory.rows_of([{"arm": "solo", "mode": "done", "by_rank": ranks}], {}, 0.1)
    assert (row["value"], row["allowed"], row["over"]) == (3.5, 3, 2.5)
    report = Report("memory", 2, [row], memory.COLUMNS)
    memory.judge(report)
    assert [goal.met for goal in report.goals] == [False, True]


def test_accuracy_pairs_folds_and_seeds():
    def one(arm, fold, seed, score):
        own = {"elapsed": 1.0, "accuracy": score, "identical": True, "staleness": {"0": 1, "1": 1}, "skipped": 0}
        return {"arm": arm, "fold": fold, "seed": seed, "epochs": 1, "by_rank": [own] * RANKS}

    blocks = [one("horovod", f, s, 0.9 + 0.01 * f) for f in range(5) for s in range(3)]
    blocks += [one("solo", f, s, 0.9 + 0.01 * f - 0.002 * s) for f in range(5) for s in range(3)]
    rows = trainings.rows_of(blocks, {}, "horovod")
    assert rows[1]["difference"] == pytest.approx(-0.002)
    assert rows[1]["difference_low"] < -0.002 < rows[1]["difference_high"] < 0
    assert rows[1]["staleness"] == 0.5
    assert rows[0]["difference"] == 0.0
    report = Report("accuracy", RANKS, rows, accuracy.COLUMNS)
    trainings.judge(report, "horovod")
    assert [goal.met for goal in report.goals] == [False, True]  # 0.92 is below 0.95


def test_soak_growth_leaves_out_the_beginning():
    notes = [{"round": 1000.0 * i, "mb": 300.0 + min(i, 10) * 5} for i in range(100)]
    assert soak.growth(notes) == pytest.approx(0.0, abs=1e-9)
    rising = [{"round": 1000.0 * i, "mb": 300.0 + 0.01 * i} for i in range(100)]
    assert soak.growth(rising) == pytest.approx(1.0)


def test_progress_says_what_is_left():
    said = []
    progress = Progress(2, said.append)
    progress("one")
    progress("two")
    assert said[0].startswith("[1/2] one; ")
    assert said[1] == "[2/2] two; 0.0 min left"


def test_command_line():
    spec = importlib.util.spec_from_file_location("bench", BENCH)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH.parent))
        spec.loader.exec_module(module)
        parser = module.parser()
        args = parser.parse_args(["straggler", "--ranks", "4", "--delay", "0.1", "0.2"])
    assert isinstance(args, argparse.Namespace)
    assert (args.ranks, args.delay, args.repetitions) == (4, [0.1, 0.2], 3)
    assert set(module.CASES) == {
        *("straggler", "skew", "no_stragglers", "activation", "memory", "accuracy", "split_classes", "convergence"),
        *("hetero", "sleeping_rank", "exchange_cost", "network", "scaling", "pull_cost", "time_to_accuracy", "soak"),
        *("sequence_lengths", "gpu"),
    }
    for old in ("balanced", "hard", "lengths", "independence", "exchange", "pull", "race"):
        assert parser.parse_args([old]).ranks == parser.parse_args([module.current_name(old)]).ranks
    for name in module.CASES:
        assert parser.parse_args([name]).ranks > (name != "gpu")
    assert np.isclose(parser.parse_args(["no_stragglers"]).wide, 0.015)
