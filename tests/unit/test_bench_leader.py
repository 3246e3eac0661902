"""What the benchmarks of leader-pull make of the blocks that their jobs bring home."""

from __future__ import annotations

import argparse
import math

import pytest

from scripts.benchmarks.cases import hetero, pull_cost, sleeping_rank, time_to_accuracy
from scripts.benchmarks.support import leadership, plot
from scripts.benchmarks.support.arms import eager, parse_arms, waits_for_nobody
from scripts.benchmarks.support.report import Report

RANKS = 4


# -- arms -----------------------------------------------------------------------------------------------------


def test_leaders_are_arms_where_a_case_has_them():
    assert parse_arms("horovod,lsgd,easgd", RANKS, leaders=True) == ["horovod", "lsgd", "easgd"]
    with pytest.raises(ValueError, match="'lsgd' is not there in this case"):
        parse_arms("horovod,lsgd", RANKS, gossip=True)
    assert [arm for arm in ("horovod", "solo", "sgp", "lsgd", "0.75") if eager(arm)] == ["solo", "0.75"]
    assert [arm for arm in ("horovod", "solo", "sgp", "adpsgd-bf16", "easgd") if waits_for_nobody(arm)] == [
        "adpsgd-bf16",
        "easgd",
    ]


def test_leaders_look_different_from_what_is_drawn_beside_them():
    arms = ["horovod", "ddp", "all", "majority", "solo", "auto", "sgp", "osgp", "dpsgd", "adpsgd", "lsgd", "easgd"]
    assert len({plot.colour(arm, arms) for arm in arms}) == len(arms)
    assert len({plot.colour(arm, pull_cost.ARMS) for arm in pull_cost.ARMS}) == len(pull_cost.ARMS)


# -- hetero ---------------------------------------------------------------------------------------------------


def window(arm, fast, slow, even, repetition=0):
    """A block of 10 s: ranks step each ``fast`` s, the last one each ``slow`` s."""

    def own(seconds):
        ends = [seconds * (i + 1) for i in range(int(10 / seconds))]
        stats = {"steps": len(ends), "pulls": len(ends) // 4}
        return {"ends": ends, "waited": 0.0, "stats": stats, "latency_s": 0.1, "identical": True}

    block = {"arm": arm, "repetition": repetition, "even": even, "synchronous": arm == "horovod", "batch": 2}
    return {**block, "window": 10.0, "by_rank": [own(fast)] * (RANKS - 1) + [own(slow)]}


def test_hetero_compares_the_others_with_and_without_the_slow_rank():
    blocks = [window("horovod", 0.5, 0.5, False), window("horovod", 0.125, 0.125, True)]
    for repetition, paces in enumerate([(0.125, 0.125), (0.25, 0.125), (0.125, 0.15625)]):
        with_it, without = paces
        blocks += [window("lsgd", with_it, 0.5, False, repetition), window("lsgd", without, without, True, repetition)]
    rows = hetero.rows_of(blocks, {"compute": 0.1, "slowdown": 5.0})
    assert [each["arm"] for each in rows] == ["horovod", "lsgd"]
    assert rows[0]["kept"] == pytest.approx(0.25)
    assert (rows[1]["kept"], rows[1]["kept_low"], rows[1]["kept_high"]) == pytest.approx((1.0, 0.5, 1.25))
    assert rows[1]["pulls"] == 0.25
    assert rows[1]["bound"] == (5 * 3 + 1) / 4
    report = Report("hetero", RANKS, rows, hetero.COLUMNS, draw=hetero.draw)
    hetero.judge(report)
    [goal] = [goal for goal in report.goals if goal.what.startswith("lsgd")]
    assert (goal.value, goal.met) == (1.0, True)
    assert "others keep" in report.text()


def test_hetero_without_even_blocks_says_nothing_of_them():
    rows = hetero.rows_of([window("easgd", 0.125, 0.5, False)], {"compute": 0.1, "slowdown": 5.0})
    assert rows[0]["kept"] is None
    report = Report("hetero", RANKS, rows, hetero.COLUMNS)
    hetero.judge(report)
    assert not report.goals


@pytest.mark.parametrize("even", [True, False])
def test_hetero_is_drawn(even, tmp_path):
    blocks = [window(arm, 0.2, 1.0, way) for arm in ("horovod", "lsgd") for way in {False, even}]
    rows = hetero.rows_of(blocks, {"compute": 0.2, "slowdown": 5.0})
    plot.save(Report("hetero", RANKS, rows, hetero.COLUMNS, draw=hetero.draw), tmp_path / "new" / "hetero.png")
    assert (tmp_path / "new" / "hetero.png").read_bytes().startswith(b"\x89PNG")


# -- independence ---------------------------------------------------------------------------------------------


def asleep(arm, landed, apart):
    """Rank 0 of 3 sleeps 10 s from 2 s on; the others step each 1/8 s; pulls that landed on it in that time."""
    ranks = []
    for rank in range(3):
        ends = [1.0, 2.0, 12.0, 13.0] if rank == 0 else [i / 8 for i in range(1, 105)]
        own = {"ends": ends, "waits": [0.0] * len(ends), "waited_for": [None] * len(ends), "identical": True}
        own |= {"slept": 3 if rank == 0 else 0, "slept_at": 2.0 if rank == 0 else None}
        pulls = [3.0 + i / 10 for i in range(landed if rank == 0 else 20)]
        ranks.append({**own, "pulls": [-1.0, *pulls, 12.5], "apart": apart if rank == 0 else {"at the end": 0.1}})
    setting = {"sleep": 10.0, "sleeper": 0, "topology": "ring", "compute": 1.0}
    return {**setting, "arm": arm, "repetition": 0, "by_rank": ranks}, setting


APART = {"as it fell asleep": 0.5, "as it woke": 4.0, "after its next step": 3.6, "at the end": 0.6}


@pytest.mark.parametrize(
    ("landed", "apart", "met"),
    [
        (20, APART, [True, True, True, True]),
        (10, APART, [True, False, True, True]),  # its engine missed half of them
        (20, APART | {"after its next step": 5.0}, [True, True, False, True]),  # pulled too far
        (20, APART | {"as it woke": None}, [True, True, True]),  # it led: there is nobody to be near
    ],
)
def test_independence_of_ranks_that_follow(landed, apart, met):
    block, setting = asleep("lsgd", landed, apart)
    rows = sleeping_rank.rows_of([block], setting)
    assert (rows[0]["pulls"], rows[1]["pulls"]) == (landed, 20)
    assert rows[0]["apart"] == apart
    assert rows[1]["apart"] is None
    report = Report("independence", 3, rows, sleeping_rank.COLUMNS)
    sleeping_rank.judge(report)
    assert [goal.met for goal in report.goals] == met
    assert "0.5 as it fell asleep" in report.notes[0]
    report.text()


def test_independence_takes_medians_of_distances():
    blocks = [asleep("easgd", 20, APART | {"as it woke": far})[0] for far in (1.0, 9.0, None)]
    assert sleeping_rank.apart(blocks)["as it woke"] == 5.0


# -- pull -----------------------------------------------------------------------------------------------------

BYTES = 1_000_000
"""Of the model."""
IDLE = {"received": 5_000, "sent": 3_000, "seconds": 5.0}


def counts(received, sent, counted=None):
    """Of 4 pulls in 2 s, with what is there anyway."""
    own = {"received": 4 * received * BYTES + 2_000, "sent": 4 * sent * BYTES + 1_200, "seconds": 2.0}
    return own if counted is None else own | {"counted": 4 * counted * BYTES}


def wire_block(root, lsgd=1.0):
    """The leader sends twice, and one of the others sends on."""
    ranks = []
    for rank in range(RANKS):
        sent = 2.0 if rank == root else float(rank == (root + 2) % RANKS)
        own = {"lsgd": counts(0.0, sent, 0) if rank == root else counts(lsgd, sent, 1)}
        own["broadcast"] = counts(0.0 if rank == root else 1.0, sent)
        own["easgd"] = counts(1.5, 1.5, 1.5)
        ranks.append({**own, "idle": IDLE})
    block = {"part": "wire", "arms": ["lsgd", "easgd", "broadcast"], "rounds": 4, "root": root, "repetition": root}
    return {**block, "by_rank": ranks}


def test_bytes_are_those_of_ranks_that_are_pulled_less_what_is_there_anyway():
    setting = {"part": "wire", "megabytes": BYTES / 1e6}
    rows = pull_cost.wire_rows([wire_block(root) for root in range(RANKS)], setting)
    lsgd, easgd, broadcast = rows
    assert (lsgd["received"], lsgd["received_low"], lsgd["received_high"]) == pytest.approx((1.0, 1.0, 1.0))
    assert (lsgd["sent"], lsgd["sent_most"], lsgd["counted"]) == pytest.approx((0.75, 2.0, 1.0))
    assert (easgd["received"], easgd["expected"], easgd["sent"]) == pytest.approx((1.5, 1.5, 1.5))
    assert broadcast["counted"] is None
    assert lsgd["idle_kb"] == 1.0
    report = Report("pull", RANKS, rows, pull_cost.COLUMNS)
    pull_cost.judge(report)
    assert [goal.met for goal in report.goals] == [True] * 3


def test_a_pull_that_carries_too_much_is_told():
    rows = pull_cost.wire_rows([wire_block(0, lsgd=1.75)], {"part": "wire", "megabytes": BYTES / 1e6})
    report = Report("pull", RANKS, rows, pull_cost.COLUMNS)
    pull_cost.judge(report)
    assert [goal.met for goal in report.goals if goal.what.startswith("lsgd")] == [False, False]
    assert [goal.met for goal in report.goals if goal.what.startswith("easgd")] == [True]


def seconds_block(repetition, factor, count=8):
    """Of ``count`` rounds, each slower than the one before; a pull takes ``factor`` times as long as a broadcast."""
    own = {"broadcast": [0.1 * (i + 1) for i in range(count)], "allreduce": [0.2] * count, "easgd": [0.3] * count}
    own["lsgd"] = [factor * each for each in own["broadcast"]]
    block = {"part": "seconds", "arms": list(own), "rounds": count, "root": repetition, "repetition": repetition}
    return {**block, "by_rank": [own] * RANKS}


@pytest.mark.parametrize(("factor", "met"), [(1.05, True), (1.2, False)])
def test_seconds_are_compared_round_by_round(factor, met):
    rows = pull_cost.seconds_rows([seconds_block(i, factor) for i in range(2)], {"part": "seconds", "megabytes": 1.0})
    by_arm = {each["arm"]: each for each in rows}
    assert by_arm["lsgd"]["ratio"] == pytest.approx(factor)
    assert by_arm["lsgd"]["ratio_high"] == pytest.approx(factor)
    assert by_arm["lsgd"]["ms"] == pytest.approx(factor * 450)
    assert (by_arm["easgd"]["rival"], by_arm["easgd"]["ratio"]) == ("allreduce", pytest.approx(1.5))
    assert "ratio" not in by_arm["broadcast"]
    report = Report("pull", RANKS, rows, pull_cost.COLUMNS)
    pull_cost.judge(report)
    assert [goal.met for goal in report.goals] == [met]
    report.text()


def test_pulls_are_drawn(tmp_path):
    rows = pull_cost.wire_rows([wire_block(0)], {"part": "wire", "megabytes": BYTES / 1e6})
    rows += pull_cost.seconds_rows([seconds_block(0, 1.0, 2)], {"part": "seconds", "megabytes": 1.0})
    assert math.isinf(rows[-1]["ratio_high"])  # of two rounds
    plot.save(Report("pull", RANKS, rows, pull_cost.COLUMNS, draw=pull_cost.draw), tmp_path / "pull.png")
    assert (tmp_path / "pull.png").read_bytes().startswith(b"\x89PNG")


def test_another_rank_leads_in_each_repetition():
    args = argparse.Namespace(ranks=3, repetitions=4, rounds=1, idle=0.0)
    assert [block["root"] for block in pull_cost.blocks_of(args, "wire", ["lsgd"])] == [0, 1, 2, 0]


# -- race -----------------------------------------------------------------------------------------------------


def raced(arm, seed, curve, delay=0.1, steps=100):
    """A training of 4 ranks in groups of 2; rank 0 leads its group all the time, ranks 2 and 0 lead all in turn."""
    ranks = []
    for rank in range(RANKS):
        own = {"curve": curve if rank == 0 else [], "seconds": 10.0, "steps": steps if rank < 3 else steps // 4}
        history = [[1.0, rank // 2, 2 * (rank // 2)], [2.0, -1, 2], [4.0, rank // 2, 2 * (rank // 2)], [6.0, -1, 0]]
        own |= {"pulls": 4 if arm != "horovod" else None, "history": history if arm == "lsgd" else []}
        ranks.append(own | {"identical": True})
    return {"arm": arm, "seed": seed, "delay": delay, "group": 2, "by_rank": ranks}


RACE = {"target": 0.95}
SOON, LATE, NEVER = [[2.0, 0.9], [4.0, 0.96], [6.0, 0.97]], [[4.0, 0.9], [8.0, 0.96]], [[4.0, 0.5], [8.0, 0.94]]


def test_race_takes_the_first_evaluation_that_reaches_the_target():
    blocks = [raced("horovod", seed, curve) for seed, curve in enumerate([LATE, LATE, NEVER])]
    blocks += [raced("lsgd", seed, curve) for seed, curve in enumerate([SOON, SOON, LATE])]
    blocks += [raced("easgd", seed, curve) for seed, curve in enumerate([NEVER, NEVER, LATE])]
    horovod, lsgd, easgd = time_to_accuracy.rows_of(blocks, RACE)
    assert (horovod["value"], horovod["low"], horovod["target_s"]) == (0.96, 0.94, 8.0)
    assert math.isinf(horovod["target_high"])
    assert (lsgd["target_s"], lsgd["speedup"], lsgd["reached"]) == (4.0, 2.0, "3 of 3")
    assert (lsgd["steps_s"], lsgd["late_steps_s"]) == (32.5, 2.5)
    assert (easgd["speedup"], easgd["reached"]) == (None, "1 of 3")
    report = Report("race", RANKS, [horovod, lsgd, easgd], time_to_accuracy.COLUMNS)
    time_to_accuracy.judge(report)
    assert [goal.met for goal in report.goals] == [True, True, False, False]  # accuracy and time, of each
    assert "inf" in report.text()


def test_race_has_no_time_to_keep_where_none_is_late():
    rows = time_to_accuracy.rows_of([raced("horovod", 0, LATE, 0.0), raced("lsgd", 0, SOON, 0.0)], RACE)
    report = Report("race", RANKS, rows, time_to_accuracy.COLUMNS)
    time_to_accuracy.judge(report)
    assert len(report.goals) == 1


def options(**more):
    given = {
        "ranks": 8,
        "fewer": 4,
        "seconds": 1.0,
        "every": 1.0,
        "compute": 0.0,
        "lr": 0.1,
        "groups": 2,
        "quick": False,
    }
    given |= {"local_period": 4, "global_period": 16, "arms": "horovod,lsgd", "delay": [0.0, 0.2], "repetitions": 3}
    return argparse.Namespace(**given | {"leadership": None, "target": 0.95, "limit": None} | more)


def test_race_runs_every_arm_with_and_without_delay():
    blocks = time_to_accuracy.blocks_of(options(), 8)
    assert len({(block["arm"], block["seed"], block["delay"]) for block in blocks}) == len(blocks) == 12
    assert {block["group"] for block in blocks} == {4}


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"groups": 3}, "8 and 4 ranks cannot be parted into so many"),
        ({"arms": "horovod", "leadership": "x.png"}, "nobody leads"),
        ({"arms": "broadcast"}, "no arm 'broadcast'"),
    ],
)
def test_race_refuses_what_cannot_be(wrong, match):
    with pytest.raises(ValueError, match=match):
        time_to_accuracy.run(options(**wrong), lambda _: None)


# -- leadership -----------------------------------------------------------------------------------------------


def test_a_training_clock_stops_between_stretches():
    clock = leadership.Clock()
    clock.went(100.0, 2.0)
    clock.went(105.0, 3.0)
    assert clock.now == 5.0
    assert [clock.at(unix) for unix in (99.0, 100.5, 103.0, 105.0, 106.0, 120.0)] == [0.0, 0.5, 2.0, 2.0, 3.0, 5.0]


def test_pulls_of_each_group_count_once():
    block = raced("lsgd", 0, SOON)
    pulls = leadership.merged([own["history"] for own in block["by_rank"]], 2)
    assert pulls == [[1.0, 0, 0], [1.0, 1, 2], [2.0, -1, 2], [4.0, 0, 0], [4.0, 1, 2], [6.0, -1, 0]]
    assert leadership.reigns(pulls, 9.0) == [(-1, 2, 2.0, 6.0), (-1, 0, 6.0, 9.0), (0, 0, 1.0, 9.0), (1, 2, 1.0, 9.0)]
    assert leadership.shares(pulls) == {0: 0.5, 2: 0.5}
    assert leadership.shares(pulls, 1) == {2: 1.0}
    assert leadership.reigns([], 9.0) == []


@pytest.mark.parametrize("group", [1, 2, 4])
def test_race_and_leadership_are_drawn(group, tmp_path):
    blocks = [raced(arm, 0, SOON, delay) for arm in ("horovod", "lsgd") for delay in (0.0, 0.2)]
    rows = time_to_accuracy.rows_of([{**block, "group": group} for block in blocks], RACE)
    plot.save(Report("race", RANKS, rows, time_to_accuracy.COLUMNS, draw=time_to_accuracy.draw), tmp_path / "race.png")
    drawn = [each for each in rows if each["leaders"]]
    plot.picture(tmp_path / "leaders.png", "who led when", time_to_accuracy.draw_leadership, drawn, 3.0)
    for name in ("race.png", "leaders.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
