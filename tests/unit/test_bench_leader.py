"""What the benchmarks of leader-pull make of the blocks that their jobs bring home."""

from __future__ import annotations

import pytest

from scripts.benchmarks import hetero, independence, plot
from scripts.benchmarks.report import Report
from scripts.benchmarks.schedule import eager, parse_arms, waits_for_nobody

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
    plain = ["lsgd", "easgd", "broadcast", "allreduce"]
    assert len({plot.colour(arm, plain) for arm in plain}) == len(plain)


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
    rows = independence.rows_of([block], setting)
    assert (rows[0]["pulls"], rows[1]["pulls"]) == (landed, 20)
    assert rows[0]["apart"] == apart
    assert rows[1]["apart"] is None
    report = Report("independence", 3, rows, independence.COLUMNS)
    independence.judge(report)
    assert [goal.met for goal in report.goals] == met
    assert "0.5 as it fell asleep" in report.notes[0]
    report.text()


def test_independence_takes_medians_of_distances():
    blocks = [asleep("easgd", 20, APART | {"as it woke": far})[0] for far in (1.0, 9.0, None)]
    assert independence.apart(blocks)["as it woke"] == 5.0
