"""Plans of the benchmarks' cases, formulas of their bounds, and parts of their jobs that need no ranks."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
import torch

from hvd_async.simulation.names import LEADERS
from hvd_async.simulation.schedule import replay, synchronous_seconds
from scripts.benchmarks.cases import convergence, gpu, hetero, network, sequence_lengths, split_classes
from scripts.benchmarks.jobs import network as network_job
from scripts.benchmarks.jobs.shared import arm as arms_of_jobs
from scripts.benchmarks.jobs.shared import torch_ranks
from scripts.benchmarks.support import leadership, plot
from scripts.benchmarks.support.arms import FOLLOWING, MUTANT
from scripts.benchmarks.support.launch import GROUPS_ENV, NotHereError, Progress, groups_env, repetitions
from scripts.benchmarks.support.trainings import block_of
from tests.unit.bench_jobs import options, pulls_of

RANKS = 4
WIRE = 8 * 8.0 / 50.0 / network.PAYLOAD
"""Seconds that 8 MB take at 50 Mbit/s."""


def test_arms_alternate():
    order = repetitions(["a", "b", "c"], 3)
    assert order == [(0, "a"), (0, "b"), (0, "c"), (1, "b"), (1, "c"), (1, "a"), (2, "c"), (2, "a"), (2, "b")]


def test_progress_says_what_is_left():
    said = []
    progress = Progress(2, said.append)
    progress("one")
    progress("two")
    assert said[0].startswith("[1/2] one; ")
    assert said[1] == "[2/2] two; 0.0 min left"


# -- blocks ---------------------------------------------------------------------------------------------------


def test_convergence_trains_every_arm_alike():
    args = options(convergence, "--folds", "2", "--epochs", "2")
    blocks = convergence.blocks_of(args)
    assert len({(b["arm"], b["fold"], b["seed"], b["delay"]) for b in blocks}) == len(blocks) == 11 * 2 * 3 * 2
    for block in blocks:
        assert (block["evaluations"], block["group"], len(block["times"])) == (2, 2, 44)
        delays = np.array(block["times"]) - 0.01
        assert delays.sum(axis=1) == pytest.approx(44 * [0.01 * block["delay"]])  # of one rank in each step
        together = block["arm"] not in ("adpsgd", "lsgd", "easgd")
        assert sum(block["steps"]) == pytest.approx(4 * 44, abs=2)
        assert not together or block["steps"] == [44] * 4
    twins = [b["times"] for b in blocks if (b["fold"], b["seed"], b["delay"]) == (1, 2, 2.0)]
    assert len(twins) == 11
    assert all(each == twins[0] for each in twins)
    block = block_of(args, "solo", 0, 1, "plain", "classes", np.zeros((3, RANKS)))
    assert (block["evaluations"], block["steps"]) == (1, [3] * RANKS), "other cases evaluate once"


def test_split_classes_trains_by_the_optimizers_defaults_but_where_the_arm_says_otherwise():
    every = ",".join(["horovod", "solo", "sgp", "lsgd", "easgd", *split_classes.OWN])
    args = options(split_classes, "--folds", "2", repetitions=2)
    blocks = split_classes.blocks_of(args, split_classes.arms_of(every, RANKS))
    assert len({(block["arm"], block["fold"], block["seed"]) for block in blocks}) == len(blocks) == 40
    said = {block["arm"]: {name for name in block if name in sum(FOLLOWING.values(), ())} for block in blocks}
    assert said["lsgd"] == said["lsgd-common"] == said["easgd"] == set()
    assert said["lsgd-close"] == said["lsgd-common-close"] == {"global_period", "global_pull"}
    assert said["easgd-close"] == {"global_period", "alpha", "beta"}
    assert {block["arm"] for block in blocks if "common" in block} == {"lsgd-common", "lsgd-common-close"}
    assert {block["algorithm"] for block in blocks if block["mean"]} == set(LEADERS)
    steps = {block["arm"]: block["steps"] for block in blocks}  # where nobody waits, the late rank takes fewer
    assert steps["horovod"] == steps[MUTANT] == steps["sgp"] == [264] * RANKS
    assert steps["lsgd-common-close"] == steps["lsgd"] == steps["easgd-close"] == [302, 302, 302, 151]


def test_sequence_lengths_gives_all_arms_the_same_batches():
    args = options(sequence_lengths, "--steps", "12", repetitions=2)
    blocks = sequence_lengths.blocks_of(args, ["horovod", "majority", "solo"])
    by_seed = {seed: [sequence_lengths.planned(b, RANKS) for b in blocks if b["seed"] == seed] for seed in (0, 1)}
    for first, *others in by_seed.values():
        assert first.shape == (12, RANKS)
        assert len(others) == 2
        assert all(np.array_equal(first, other) for other in others)
        assert (first.std(axis=1) > 0).mean() > 0.9
    assert not np.array_equal(by_seed[0][0], by_seed[1][0])


def test_network_computes_for_a_share_of_an_allreduce_unless_it_is_said():
    args = options(network)
    assert network.blocks_of(args, ["sgp"], 50.0)[0]["compute"] == pytest.approx(0.25 * 1.75 * WIRE)
    args.compute = 0.6
    assert network.blocks_of(args, ["sgp"], 50.0)[0]["compute"] == 0.6


# -- bounds ---------------------------------------------------------------------------------------------------


def test_hetero_bounds():
    assert hetero.bound_of("adpsgd-bf16", 8, 10.0) == pytest.approx(71 / 8)
    assert hetero.bound_of("dpsgd", 8, 10.0) == 1.0
    assert hetero.bound_of("majority", 8, 10.0) is None


def test_sequence_lengths_bounds_are_those_of_the_lengths():
    frames = np.tile([[10, 10, 10, 30], [10, 30, 10, 10], [30, 10, 10, 10], [10, 10, 30, 10]], (3, 1))

    def bound(arm, seed=0):
        ranks = [{"longest": frames[:, rank].tolist(), "rounds_before": 2} for rank in range(RANKS)]
        return sequence_lengths.bound_of({"arm": arm, "seed": seed, "by_rank": ranks})

    assert bound("horovod") == pytest.approx(1.0)
    assert bound("solo") == pytest.approx(30 / 15)
    majority = replay(frames.astype(float), "majority", seed=7, first_round=3).seconds
    assert bound("majority", 7) == pytest.approx(synchronous_seconds(frames) / majority)
    assert bound("auto") is None


@pytest.mark.parametrize(
    ("arm", "need"),
    [
        ("horovod", (0.0, 14.0)),
        ("ddp-fp16", (0.0, 7.0)),
        ("solo", (0.0, 14.0)),
        ("post-local-sgd", (0.0, 3.5)),
        ("torchft", (0.0, 3.5)),
        ("torchft-diloco", (0.0, 3.5)),
        ("local-sgd", (0.0, 3.5)),
        ("local-sgd-avg7", (0.0, 2.0)),
        ("local", (3.5, 0.0)),
        ("diloco-bf16-avg7", (1.0, 0.0)),
        ("decent-dp", (8.0, 0.0)),
        ("sgp", (0.0, 8.0)),
        ("sgp-avg4", (0.0, 11.5)),
        ("osgp-bf16", (4.0, 0.0)),
        ("dpsgd", (8.0, 0.0)),
        ("dpsgd-avg4", (8.0, 3.5)),
        ("dpsgd-bf16-avg4", (4.0, 3.5)),
        ("dpsgd-int8", (2.0 + 8 / 2048, 0.0)),  # with a scale for every 2,048 elements
        ("adpsgd", None),
        ("lsgd", None),
    ],
)
def test_what_a_step_must_send(arm, need):
    assert network.need_of(arm, 8, 8.0) == need
    alone = network.need_of(arm, 1, 8.0)
    assert alone is None or sum(alone) == 0


def test_power_sgd_sends_factors_of_the_gradients(monkeypatch):
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    model = network_job.network(8.0)
    sent = 0
    for parameter in model.parameters():
        if parameter.dim() == 1:
            sent += parameter.numel()
            continue
        compressed, _, factors = powerSGD_hook._should_compress(*parameter.shape, 1, 2)
        sent += factors if compressed else parameter.numel()
    assert network.need_of("ddp-powersgd", 8, 8.0) == (0.0, pytest.approx(1.75 * 4e-6 * sent))
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(2e6, rel=0.01)


def test_messages_go_after_the_computation_or_under_it():
    block = {"compute": 0.5, "megabytes": 8.0, "bandwidth_mbit": 50.0}
    leasts = {"horovod": 0.5 + 1.75 * WIRE, "sgp": 0.5 + WIRE, "dpsgd": WIRE, "easgd": 0.5}
    leasts["dpsgd-avg4"] = WIRE + 1.75 / 4 * WIRE
    for arm, least in leasts.items():
        assert network.least_seconds(arm, 8, block) == pytest.approx(least)
    assert network.least_seconds("dpsgd-int8", 8, block) == 0.5  # less than the computation


def test_where_horovod_is_level():
    assert network.crossing([(50.0, 2.0), (200.0, 0.5)]) == pytest.approx([100.0])
    assert network.crossing([(50.0, 2.0), (200.0, 1.0)]) == []
    assert network.crossing([(50.0, 0.5), (200.0, 2.0), (800.0, 0.5)]) == pytest.approx([100.0, 400.0])


def test_base_line_is_horovod_without_compression_if_it_is_there():
    assert network.baseline(["horovod-fp16", "horovod", "sgp"]) == "horovod"
    assert network.baseline(["ddp-fp16", "horovod-fp16"]) == "horovod-fp16"
    assert network.baseline(["sgp"]) == "horovod"


# -- who led --------------------------------------------------------------------------------------------------


def test_a_training_clock_stops_between_stretches():
    clock = leadership.Clock()
    clock.went(100.0, 2.0)
    clock.went(105.0, 3.0)
    assert clock.now == 5.0
    assert [clock.at(unix) for unix in (99.0, 100.5, 103.0, 105.0, 106.0, 120.0)] == [0.0, 0.5, 2.0, 2.0, 3.0, 5.0]


HISTORIES = [pulls_of(rank) for rank in range(RANKS)]


def test_pulls_of_each_group_count_once():
    pulls = leadership.merged(HISTORIES, 2)
    assert pulls == [[1.0, 0, 0], [1.0, 1, 2], [2.0, -1, 2], [4.0, 0, 0], [4.0, 1, 2], [6.0, -1, 0]]
    assert leadership.reigns(pulls, 9.0) == [(-1, 2, 2.0, 6.0), (-1, 0, 6.0, 9.0), (0, 0, 1.0, 9.0), (1, 2, 1.0, 9.0)]
    assert leadership.shares(pulls) == {0: 0.5, 2: 0.5}
    assert leadership.shares(pulls, 1) == {2: 1.0}
    assert leadership.reigns([], 9.0) == []


@pytest.mark.parametrize(("group", "labels"), [(1, 3), (2, 3), (4, 1)])
def test_who_led_is_drawn(group, labels):
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    leadership.draw(axes, leadership.merged(HISTORIES, group), RANKS, group, 9.0, late=3)
    assert [text.get_text() for text in axes.get_yticklabels()] == ["rank 0", "rank 1", "rank 2", "rank 3 (late)"]
    assert len(axes.get_legend_handles_labels()[1]) == labels
    assert [text.get_text() for text in axes.texts] == ["50%", "0%", "50%", "0%"]


def test_leadership_is_a_picture_of_its_own(tmp_path, monkeypatch):
    from scripts.benchmarks.cases import race

    monkeypatch.setattr(plot, "DPI", 20)
    setting = {"ranks": RANKS, "group": 2}
    rows = [{"setting": setting | {"delay": delay}, "leaders": leadership.merged(HISTORIES, 2)} for delay in (0.0, 0.1)]
    rows = [{**each, "seconds": 9.0} for each in rows]
    plot.picture(tmp_path / "leaders.png", "who led when", race.draw_leadership, rows, 3.0)
    assert (tmp_path / "leaders.png").read_bytes().startswith(b"\x89PNG")


# -- parts of jobs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_horovods_arm_sends_contiguous_copies_of_gradients_that_are_channels_last(compression):
    gradient = torch.arange(24.0).view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    copies = arms_of_jobs.Contiguous(getattr(arms_of_jobs.hvd.Compression, compression))
    sent, context = copies.compress(gradient)
    assert sent.is_contiguous()
    assert not gradient.is_contiguous()
    assert torch.equal(copies.decompress(sent, context), gradient)


def test_an_arm_that_gossips_hands_its_options_over(monkeypatch):
    asked = {}
    monkeypatch.setattr(arms_of_jobs.hvd, "GossipOptimizer", lambda optimizer, **given: asked.update(given))
    for arm, wanted in {
        "dpsgd-bf16-avg4": ("dpsgd", arms_of_jobs.hvd.Compression.bf16, 4),
        "local-sgd": ("allreduce", arms_of_jobs.hvd.Compression.none, 4),
        "osgp": ("osgp", arms_of_jobs.hvd.Compression.none, 0),
    }.items():
        asked.clear()
        arms_of_jobs.Arm(arm, torch.nn.Linear(2, 2), job=None)
        assert (asked["algorithm"], asked["compression"], asked["average_every"]) == wanted


@pytest.mark.parametrize(("arm", "goes_on"), [("torchft-diloco", 1.0), ("post-local-sgd", 1.0), ("ddp", 5.0)])
def test_ranks_of_rivals_go_on_from_their_own_weights_after_an_evaluation(monkeypatch, arm, goes_on):
    def average(model):
        torch.nn.init.constant_(model.weight, 5.0)

    model = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.constant_(model.weight, 1.0)
    monkeypatch.setattr(arms_of_jobs.rivals, "wrap", lambda base, compression, model, optimizer, *_: (model, optimizer))
    monkeypatch.setattr(arms_of_jobs, "average", average)
    trained = arms_of_jobs.Arm(arm, model, job=None)
    if arm == "ddp":
        average(model)  # they share one model
    with trained.consensus():
        assert model.weight.unique().tolist() == [5.0]
    assert model.weight.unique().tolist() == [goes_on]


def test_decent_dp_begins_with_the_rate_of_its_first_step(monkeypatch):
    class Wrapped:
        def __init__(self, model, make, **how):
            self.model, self.make, self._optims = model, make, []

    monkeypatch.setitem(sys.modules, "decent_dp.ddp", types.SimpleNamespace(DecentralizedDataParallel=Wrapped))
    model = torch.nn.Linear(2, 2)
    plain = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    wrapped, optimizer = arms_of_jobs.rivals._decent_dp(model, plain)
    for lr in (0.1, 0.2):
        for group in optimizer.param_groups:
            group["lr"] = lr
    wrapped._optims += [wrapped.make([(name, p)]) for name, p in model.named_parameters()]
    assert [(group["lr"], group["momentum"]) for group in optimizer.param_groups] == [(0.2, 0.9)] * 2
    optimizer.param_groups[0]["lr"] = 0.3
    assert [own.param_groups[0]["lr"] for own in wrapped._optims] == [0.3, 0.2]


def test_only_jobs_with_groups_have_process_sets():
    for arms, groups, wanted in (
        ("horovod,sgp,lsgd", 2, GROUPS_ENV),
        ("horovod,sgp,easgd", 2, {}),
        ("horovod,lsgd", 1, {}),
        ("horovod,lsgd", 4, {}),
    ):
        args = options(convergence, "--groups", str(groups), arms=arms, ranks=RANKS)
        assert groups_env(convergence.blocks_of(args), RANKS) == wanted
    assert not GROUPS_ENV.items() & network.ENVIRONMENT.items()


def test_ranks_share_cores_where_there_are_fewer(monkeypatch):
    monkeypatch.setattr(torch_ranks.os, "sched_getaffinity", lambda _: {0, 5}, raising=False)
    assert [torch_ranks.share_cores(ranks) for ranks in (1, 2, 3)] == [False, False, True]


def test_horovods_collectives_are_waited_for_asleep(monkeypatch):
    looks = {1: [True], 2: [False, False, True], 3: [True]}
    naps = []
    monkeypatch.setattr(torch_ranks.hvd, "poll", lambda handle: looks[handle].pop(0))
    monkeypatch.setattr(torch_ranks.time, "sleep", naps.append)
    torch_ranks.sleep_until_done(looks)
    assert naps == [torch_ranks.POLL] * 2
    assert not any(looks.values())


def test_without_a_gpu_the_case_says_so(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(NotHereError, match="needs a GPU, and none is visible"):
        gpu.visible_devices()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NotHereError, match="no nvidia-smi"):
        gpu.visible_devices()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    assert gpu.visible_devices() == ["1", "3"]
