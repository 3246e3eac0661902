"""What ``network`` and ``scaling`` make of a job's results: bounds by bytes, goals, crossings; no job is started."""

from __future__ import annotations

import argparse
import importlib.util

import pytest

from scripts.benchmarks.cases import network, scaling
from scripts.benchmarks.support import plot
from scripts.benchmarks.support.arms import RIVALS, compression_of, eager, installed, parse_arms
from scripts.benchmarks.support.report import Report

RANKS = 8
WIRE = 8 * 8.0 / 50.0 / network.PAYLOAD
"""Seconds that 8 MB take at 50 Mbit/s."""


def block(arm, seconds, mbit=50.0, ranks=RANKS, repetition=0, accuracy=0.9):
    """A training of three steps on as many ranks, the last of which is a little slower."""

    def own(rank):
        slower = 0.01 * (rank == ranks - 1)
        return {
            "seconds": [seconds + slower] * 3,
            "sent": 24_000_000,
            "waited": 0.3,
            "cpu": 0.4,
            "identical": True,
            "accuracy": accuracy if rank == 0 else None,
        }

    setting = {"bandwidth_mbit": mbit, "megabytes": 8.0, "compute": 0.5, "steps": 3, "batch": 16, "lr": 0.05}
    return {**setting, "arm": arm, "repetition": repetition, "by_rank": [own(rank) for rank in range(ranks)]}


@pytest.mark.parametrize(
    ("arm", "need"),
    [
        ("horovod", (14.0, False)),
        ("ddp-fp16", (7.0, False)),
        ("solo", (14.0, False)),
        ("post-local-sgd", (3.5, False)),
        ("torchft", (3.5, False)),
        ("decent-dp", (8.0, True)),
        ("sgp", (8.0, False)),
        ("osgp-bf16", (4.0, True)),
        ("dpsgd", (8.0, True)),
        ("adpsgd", None),
        ("lsgd", None),
    ],
)
def test_what_a_step_must_send(arm, need):
    assert network.need_of(arm, RANKS, 8.0) == need


def test_eight_bits_have_scales():
    need = network.need_of("dpsgd-int8", RANKS, 8.0)
    assert need is not None
    assert 2.0 < need.megabytes < 2.01


def test_one_rank_sends_nothing():
    for arm in ("horovod", "dpsgd", "post-local-sgd"):
        assert network.need_of(arm, 1, 8.0).megabytes == 0


def test_messages_go_after_the_computation_or_under_it():
    for arm, least in (("horovod", 0.5 + 1.75 * WIRE), ("sgp", 0.5 + WIRE), ("dpsgd", WIRE), ("easgd", 0.5)):
        assert network.least_seconds(arm, RANKS, block(arm, 1.0)) == pytest.approx(least)
    assert network.least_seconds("dpsgd-int8", RANKS, block("dpsgd-int8", 1.0)) == 0.5  # less than the computation


def test_with_compression_in_all_arms_speed_ups_are_over_horovods_with_it():
    found = network.rows_of([block("horovod-fp16", 1.79), block("dpsgd-fp16", 0.89)])
    assert [each["speedup"] for each in found] == [1.0, pytest.approx(2.0)]
    assert found[1]["bound"] == pytest.approx((0.5 + 0.875 * WIRE) / (0.5 * WIRE))


def rows():
    """Three arms at two bandwidths; Horovod is quicker at the higher one."""
    found = []
    for repetition, more in enumerate((0.0, 0.1, 0.2)):
        found += [block("horovod", 3.0 + more, repetition=repetition, accuracy=0.90 + more / 10)]
        found += [block("decent-dp", 1.5 + more, repetition=repetition), block("dpsgd", 1.4, repetition=repetition)]
        found += [block("horovod", 0.2, 1000.0, repetition=repetition), block("dpsgd", 0.4, 1000.0)]
    return network.rows_of(found)


def test_rows():
    horovod, decent, dpsgd, *fast = rows()
    assert (horovod["arm"], horovod["setting"]["bandwidth_mbit"]) == ("horovod", 50.0)
    assert (horovod["value"], horovod["low"], horovod["high"]) == pytest.approx(
        (3110, 3010, 3210)
    )  # the slowest rank's
    assert horovod["accuracy"] == pytest.approx(0.91)
    assert horovod["accuracy_low"] < 0.9 < 0.92 < horovod["accuracy_high"]
    assert decent["speedup"] == pytest.approx(3110 / 1610)
    assert dpsgd["bound"] == pytest.approx((0.5 + 1.75 * WIRE) / WIRE)
    assert dpsgd["over_least"] == pytest.approx(1.41 / WIRE)
    assert (dpsgd["sent_mb"], dpsgd["wait_ms"]) == pytest.approx((8.0, 100.0))
    assert [each["speedup"] for each in fast] == pytest.approx([1.0, 0.21 / 0.41])


def test_goals_are_of_the_slowest_links():
    report = Report("network", RANKS, rows(), network.COLUMNS)
    network.judge(report)
    assert [(goal.what, goal.met) for goal in report.goals] == [
        ("dpsgd's step over what its bytes allow", True),
        ("dpsgd's speed-up over horovod", True),
        ("dpsgd's speed-up over decent-dp", True),
    ]
    slow = [each | {"value": 2000.0, "over_least": 1.5, "speedup": 1.5} for each in rows()]
    report = Report("network", RANKS, slow, network.COLUMNS)
    network.judge(report)
    assert [goal.met for goal in report.goals] == [False, False, True]  # decent-dp is as slow


def test_where_horovod_is_level():
    assert network.crossing([(50.0, 2.0), (200.0, 0.5)]) == pytest.approx([100.0])
    assert network.crossing([(50.0, 2.0), (200.0, 1.0)]) == []
    assert network.crossing([(50.0, 0.5), (200.0, 2.0), (800.0, 0.5)]) == pytest.approx([100.0, 400.0])
    notes = network.crossings(rows())
    assert len(notes) == 1  # decent-dp is there at one bandwidth
    assert notes[0].startswith("dpsgd and horovod are level at ")
    assert 50 < float(notes[0].split()[-2]) < 1000


def test_base_line_is_horovod_without_compression_if_it_is_there():
    assert network.baseline(["horovod-fp16", "horovod", "sgp"]) == "horovod"
    assert network.baseline(["ddp-fp16", "horovod-fp16"]) == "horovod-fp16"
    assert network.baseline(["sgp"]) == "horovod"


@pytest.mark.parametrize("ranks", [1, 3, 6])
def test_rivals_that_cannot_be_with_so_many_ranks_are_refused_before_any_job(ranks):
    with pytest.raises(ValueError, match="decent-dp wants 2, 4, 8"):
        parse_arms("horovod,decent-dp", ranks, RIVALS)


@pytest.mark.parametrize(("arm", "package"), [("decent-dp", "decent_dp"), ("torchft", "torchft")])
def test_rivals_that_are_not_installed_are_refused_before_any_job(arm, package, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else name)
    with pytest.raises(ValueError, match=f"pip install {arm}"):
        parse_arms(f"horovod,{arm}", 4, RIVALS)
    assert installed(["horovod", arm, "sgp"]) == ["horovod", "sgp"]


def test_blocks():
    args = argparse.Namespace(
        ranks=8, megabytes=8.0, compute=None, steps=5, batch_size=16, lr=0.1, repetitions=2
    )  # fmt: skip
    blocks = network.blocks_of(args, ["horovod", "sgp"], 50.0)
    assert [(each["arm"], each["repetition"]) for each in blocks] == [
        *(("horovod", 0), ("sgp", 0)),
        *(("sgp", 1), ("horovod", 1)),
    ]
    assert blocks[0]["compute"] == pytest.approx(0.25 * 1.75 * WIRE)
    args.compute = 0.6
    assert network.blocks_of(args, ["sgp"], 50.0)[0]["compute"] == 0.6


def test_scaling_is_over_the_first_arm_alone():
    found = [block("horovod", 0.49, ranks=1), block("sgp", 0.99, ranks=1)]
    found += [block("horovod", 1.99, ranks=4), block("sgp", 0.99, ranks=4)]
    by = {(each["setting"]["ranks"], each["arm"]): each for each in scaling.rows_of(found)}
    assert by[1, "horovod"]["value"] == pytest.approx(16 / 0.5)
    assert by[1, "sgp"]["efficiency"] == pytest.approx(0.5)
    assert by[4, "horovod"]["efficiency"] == pytest.approx(0.25)
    assert by[4, "sgp"]["speedup"] == pytest.approx(2.0)


@pytest.mark.parametrize("case", [network, scaling])
def test_it_is_drawn(case, tmp_path):
    found = case.rows_of([block(arm, 1.0, ranks=n) for arm in ("horovod", "decent-dp", "osgp-bf16") for n in (2, 4)])
    plot.save(Report(case.__name__, RANKS, found, case.COLUMNS, draw=case.draw), tmp_path / "drawn.png")
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")


# -- arms -----------------------------------------------------------------------------------------------------


def test_compressed_arms():
    assert compression_of("horovod-fp16") == ("horovod", "fp16")
    assert compression_of("post-local-sgd") == ("post-local-sgd", "none")
    assert eager("solo-fp16")
    assert not eager("ddp-bf16")
    assert not eager("decent-dp")
    named = "horovod-fp16,ddp-bf16,solo-fp16,decent-dp,post-local-sgd"
    assert parse_arms(named, 4, RIVALS, reduced=True) == named.split(",")


@pytest.mark.parametrize("arm", ["horovod-bf16", "decent-dp-fp16", "lsgd-fp16", "all-int8"])
def test_arms_that_cannot_be_compressed_so(arm):
    with pytest.raises(ValueError, match="is not compressed so"):
        parse_arms(arm, 4, RIVALS, leaders=True, reduced=True)


def test_rivals_and_compressed_gradients_are_not_in_every_case():
    for arm in ("decent-dp", "post-local-sgd", "torchft", "horovod-fp16"):
        with pytest.raises(ValueError, match="not there in this case"):
            parse_arms(arm, 4)


def test_every_arm_looks_different():
    assert len({plot.colour(arm, network.ARMS) for arm in network.ARMS}) == len(network.ARMS)
