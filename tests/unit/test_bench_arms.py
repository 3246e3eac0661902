"""Arms of the benchmarks: what their names mean, which a case has, and how they look in pictures."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from hvd_async.algorithms.gossip.plan import make_plan
from hvd_async.simulation.names import RIVALS, compression_of, gossip_of, quorum_of, waits_for_nobody
from scripts.benchmarks.cases import convergence, network, pull_cost, split_classes
from scripts.benchmarks.support import plot
from scripts.benchmarks.support.arms import FOLLOWING, MUTANT, eager, installed, parse_arms

EVERY = {"gossip": True, "leaders": True, "reduced": True}


def test_names_mean_quorums_algorithms_and_compressions():
    assert [quorum_of(arm) for arm in ("solo", "k6", "0.75")] == ["solo", 6, 0.75]
    for arm, (algorithm, compression, average_every) in {
        "sgp": ("sgp", "none", 0),
        "dpsgd-int8": ("dpsgd", "int8", 0),
        "sgp-avg4": ("sgp", "none", 4),
        "dpsgd-bf16-avg10": ("dpsgd", "bf16", 10),
        "local-sgd": ("allreduce", "none", 4),
        "local-sgd-avg8": ("allreduce", "none", 8),
        "local": ("local", "none", 4),
        "diloco-int8": ("diloco", "int8", 4),
        "slowmo-bf16-avg8": ("slowmo", "bf16", 8),
    }.items():
        assert gossip_of(arm) == (algorithm, compression, average_every, False)
        assert arm in ("local-sgd", "local-sgd-avg8") or gossip_of(f"{arm}-qg").quasi_global
        plan = make_plan(4, **gossip_of(arm)._asdict()).config
        assert (plan.algorithm, plan.compression, plan.average_every, plan.quasi_global) == gossip_of(arm)
    assert [gossip_of(arm) for arm in ("solo", "post-local-sgd", "horovod")] == [None] * 3
    assert compression_of("horovod-fp16") == ("horovod", "fp16")
    assert compression_of("ddp-powersgd") == ("ddp", "powersgd")
    assert compression_of("post-local-sgd") == ("post-local-sgd", "none")
    named = ["horovod", "ddp-bf16", "decent-dp", "solo", "solo-fp16", "0.75", "sgp", "adpsgd-bf16", "lsgd", "easgd"]
    named += ["local-sgd", "ddp-powersgd", "torchft-diloco"]
    assert [arm for arm in named if eager(arm)] == ["solo", "solo-fp16", "0.75"]
    assert [arm for arm in named if waits_for_nobody(arm)] == ["adpsgd-bf16", "lsgd", "easgd"]


def test_a_list_has_each_arm_once_in_its_order(monkeypatch):
    assert parse_arms("horovod, solo,k2,solo", 4) == ["horovod", "solo", "k2"]
    assert parse_arms("horovod,adpsgd, sgp-bf16", 4, gossip=True) == ["horovod", "adpsgd", "sgp-bf16"]
    assert parse_arms("horovod,lsgd,easgd", 4, leaders=True) == ["horovod", "lsgd", "easgd"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    named = "horovod-fp16,ddp-bf16,ddp-powersgd,solo-fp16,decent-dp,post-local-sgd,torchft,torchft-diloco,dpsgd-avg4"
    assert parse_arms(named, 4, RIVALS, **EVERY) == named.split(",")
    hosts = ["solo-hosts", "sgp-hosts", "adpsgd-bf16-hosts", "dpsgd-avg4-hosts"]
    assert parse_arms(",".join(hosts), 4, local_size=2, **EVERY) == hosts
    assert [gossip_of(arm) for arm in hosts] == [gossip_of(arm.removesuffix("-hosts")) for arm in hosts]


@pytest.mark.parametrize(
    ("text", "case", "hint"),
    [
        ("", EVERY, "no arm was named"),
        ("k5", EVERY, "5 of 4 ranks"),
        ("k0", EVERY, "no arm 'k0'"),
        ("most", EVERY, "no arm 'most'"),
        ("1.5", EVERY, "no arm"),
        ("nan", EVERY, "no arm"),
        ("sgp-int4", EVERY, "messages of sgp may be fp16, bf16, int8"),
        ("sgp-avg", EVERY, "messages of sgp may be fp16, bf16, int8; -avg4 may come last"),
        ("adpsgd-int8", EVERY, "adpsgd has no fixed neighbours"),
        ("adpsgd-avg4", EVERY, "adpsgd averages all ranks at no step"),
        ("local-sgd-bf16", EVERY, "averages over all ranks travel as they are"),
        *((arm, EVERY, "is for those that gossip") for arm in ("horovod-avg4", "solo-avg4", "lsgd-avg8")),
        *(
            (arm, EVERY, "is not compressed so")
            for arm in ("horovod-bf16", "horovod-powersgd", "lsgd-fp16", "all-int8")
        ),
        *((arm, {}, f"{arm!r} is not there in this case") for arm in ("decent-dp", "post-local-sgd", "torchft")),
        *((arm, {"gossip": True}, "is not there in this case") for arm in ("lsgd", "horovod-fp16")),
        ("horovod-qg", {}, "-avg4 or -qg is for those that gossip"),
        ("osgp-qg", {"gossip": True}, "under osgp each rank's momentum is its own"),
        ("horovod,sgp", {"leaders": True}, "'sgp' is not there in this case"),
        ("sgp-hosts", EVERY, "-hosts is for partial allreduce and gossip, --per-host 2"),
        *((arm, {**EVERY, "local_size": 2}, "-hosts is for") for arm in ("horovod-hosts", "lsgd-hosts")),
        ("sgp-hosts", {**EVERY, "local_size": 3}, "3 ranks a host do not divide 4 ranks"),
        ("ddp,sgp", {"rivals": ("horovod",), "gossip": True}, "not there in this case"),
    ],
)
def test_arms_that_cannot_be_are_refused(text, case, hint):
    with pytest.raises(ValueError, match=hint):
        parse_arms(text, 4, **case)


@pytest.mark.parametrize("ranks", [1, 3, 6])
def test_decent_dp_wants_ranks_that_pair_off(ranks):
    with pytest.raises(ValueError, match="decent-dp wants 2, 4, 8"):
        parse_arms("horovod,decent-dp", ranks, RIVALS)


@pytest.mark.parametrize(
    ("arm", "package"), [("decent-dp", "decent_dp"), ("torchft", "torchft"), ("torchft-diloco", "torchft")]
)
def test_rivals_that_are_not_installed_are_refused(arm, package, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else name)
    with pytest.raises(ValueError, match=f"pip install {package.replace('_', '-')}"):
        parse_arms(f"horovod,{arm}", 4, RIVALS)
    assert installed(["horovod", arm, "sgp"]) == ["horovod", "sgp"]


def test_arms_of_split_classes_come_last_and_leave_nothing_out():
    ordered = ["horovod", "lsgd", MUTANT, "lsgd-close"]
    assert split_classes.arms_of(f"lsgd-close, {MUTANT},horovod,lsgd", 4) == ordered
    for own in split_classes.OWN.values():
        assert own.keys() - {"algorithm", "common"} <= {*FOLLOWING.get(own["algorithm"], ())}


# -- how they look --------------------------------------------------------------------------------------------

ALL = ["horovod", "ddp", "all", "majority", "solo", "auto", "sgp", "osgp", "dpsgd", "adpsgd", "lsgd", "easgd"]
TOGETHER = {
    "all": ALL,
    "convergence": convergence.ALL.split(","),
    "network": list(network.ARMS),
    "pull_cost": list(pull_cost.ARMS),
    "split_classes": ["horovod", "solo", "sgp", "lsgd", "easgd", *split_classes.OWN],
    "compressed": ["horovod", "sgp", "osgp", "dpsgd", "adpsgd", "sgp-int8", "dpsgd-int8", "dpsgd-bf16"],
    "mixed": ["horovod", "ddp", "k3", "0.75", "sgp", "sgp-int8", "sgp-fp16", "easgd"],
}


@pytest.mark.parametrize("case", TOGETHER)
def test_arms_that_are_drawn_together_look_different(case):
    arms = TOGETHER[case]
    assert len({plot.colour(arm, arms) for arm in arms}) == len(arms)
    lines = {tuple(plot.line(arm, arms)[key] for key in ("color", "linestyle", "marker")) for arm in arms}
    assert len(lines) == len(arms)


@pytest.mark.parametrize(
    "arms",
    [["majority", "adpsgd"], ["solo", "majority", "all", "sgp", "osgp", "dpsgd", "adpsgd"], ["horovod", "torchft"]],
)
def test_no_two_share_a_colour_while_there_are_enough(arms):
    assert len({plot.colour(arm, arms)[0] for arm in arms}) == len(arms)
    assert plot.colour(arms[0], arms) == plot.colour(arms[0], arms[:1]), "the first keeps its own"


def test_arms_of_one_algorithm_share_a_colour_and_a_family_its_lines():
    arms = ["all", "dpsgd", "dpsgd-int8"]
    looks = [plot.colour(arm, arms) for arm in arms]
    assert looks[1][0] == looks[2][0] != looks[0][0]
    assert looks[1][1] != looks[2][1]
    assert plot.line("sgp-int8", ["sgp-int8"])["linestyle"] == plot.line("dpsgd", ["dpsgd"])["linestyle"]


def test_shares_near_one_are_told_apart():
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    axes.plot([0.2, 0.9, 1.0])
    plot.near_one(axes)
    places = axes.transData.transform([(0, y) for y in (0.5, 0.9, 0.99, 1.0)])[:, 1]
    steps = np.diff(places)
    assert (steps > 0).all()
    assert steps.max() < 2 * steps.min()  # on a straight scale, 40 times
    low, high = axes.get_ylim()
    assert low < 0.2
    assert high > 1
    shown = [float(label.get_text()) for label in axes.get_yticklabels()]
    assert shown == axes.get_yticks().tolist()
    assert (shown[-2:], min(shown) >= low) == ([0.99, 1.0], True)
