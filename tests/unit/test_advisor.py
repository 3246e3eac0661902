"""The advisor: the culprit is found, predictions meet the bounds that are known, and what is unknown is said."""

from __future__ import annotations

import json
import socket

import numpy as np
import pytest

from hvd_async.advisor.advice import advise, choose, find_culprits, fit, mode_of, read_given
from hvd_async.advisor.prediction import MODES, YARDSTICK, Prediction, Risk, Spread, named_modes, predict
from hvd_async.advisor.report import sentences
from hvd_async.cli.main import main
from hvd_async.simulation.network import Network
from hvd_async.traces.format import DDP, FSDP, HOROVOD, Header, read_trace
from scripts.benchmarks.support.schedule import one_random, slowest_work, synchronous_seconds
from tests.unit.test_traces import write

SLOW = np.tile([0.1, 0.1, 0.2, 0.1], (60, 1))
"""Rank 2 always takes twice as long."""


def record_synchronous(folder, work=SLOW, allreduce_s: float = 0.004, **header) -> None:
    """Record a job in which all ranks wait for the last one and for the allreduce."""
    header = {"framework": "torch", "algorithm": HOROVOD, "parameter_bytes": 4_000_000, **header}
    waits = work.max(axis=1) + allreduce_s
    for rank, own in enumerate(work.T):
        steps = [(compute, wait - compute, 0.0) for compute, wait in zip(own.tolist(), waits.tolist(), strict=True)]
        write(folder, rank, work.shape[1], steps, **header)


# -- culprits -------------------------------------------------------------------------------------------------


def test_the_slow_rank_is_found_and_not_the_one_that_is_late_because_it_waits(tmp_path):
    """A chain: rank 1 waits for rank 0, rank 2 for rank 1, so rank 1 arrives at rank 2 as late as rank 0 does at it."""
    for rank, compute in enumerate((0.3, 0.1, 0.12)):
        write(tmp_path, rank, 3, [(compute, 0.3 - compute, 0.0)] * 30, algorithm="sgp")
    trace = read_trace(tmp_path)
    found = find_culprits(trace.work, trace.waits)
    assert found.slow == 0
    assert found.blame[0] == pytest.approx(1.0)
    np.testing.assert_allclose(found.held[0], [0.0, 0.2, 0.18], atol=1e-4)
    np.testing.assert_allclose(found.waited, [0.0, 0.2, 0.18], atol=1e-4)
    assert "Rank 0 is slow" in found.text()


def test_random_stragglers_are_not_called_slow():
    work = one_random(400, 4, 0.1, 0.1, seed=0)
    found = find_culprits(work, np.zeros_like(work))
    assert found.slow is None
    assert not found.balanced
    assert found.lost == pytest.approx(1 - 0.125 / 0.2)
    assert "The stragglers are random" in found.text()
    assert find_culprits(np.full((9, 2), 0.1), np.zeros((9, 2))).balanced


# -- predictions ----------------------------------------------------------------------------------------------


def predicted(work, names: str, network: Network = Network(), size: float = 0.0, resamples: int = 1):  # noqa: B008
    found = predict(work, network, size, named_modes(work.shape[1], names), resamples=resamples)
    return {each.mode.name: each for each in found}


def test_of_a_rank_that_is_always_slow_the_bounds_are_met_exactly():
    found = predicted(SLOW, "all,adpsgd,lsgd,sgp")
    assert found["horovod"].steps_per_s == pytest.approx((5.0, 5.0, 5.0))
    assert found["all"].gain.mean == pytest.approx(1.0, rel=1e-6)
    assert [found[mode].steps_per_s.mean for mode in ("lsgd", "adpsgd")] == [pytest.approx(35 / 4, rel=0.01)] * 2
    assert found["sgp"].steps_per_s.mean <= 5.0 * 1.02
    assert found["lsgd"].wait_s == 0.0


def test_of_random_stragglers_solo_is_between_the_bounds():
    work = one_random(100, 4, 0.1, 0.1, seed=1)
    found = predicted(work, "solo,majority", resamples=3)
    best = synchronous_seconds(work) / slowest_work(work)
    assert 1.1 < found["majority"].gain.mean < found["solo"].gain.mean <= best * 1.1
    assert found["solo"].staleness > found["horovod"].staleness_most == 0
    assert found["solo"].gain.low <= found["solo"].gain.mean <= found["solo"].gain.high


def test_what_travels_costs_what_the_link_allows():
    found = predicted(np.full((30, 4), 0.1), "all,local", Network(bandwidth=1e6), size=1e5)
    assert found["horovod"].steps_per_s.mean == pytest.approx(1 / (0.1 + 2 * 3 / 4 * 0.1), rel=1e-3)
    assert found["all"].megabytes == pytest.approx(0.15)
    assert found["local"].megabytes == pytest.approx(0.15 / 4, rel=0.03)


# -- the network ----------------------------------------------------------------------------------------------


def test_the_bandwidth_is_fitted_from_the_wait_of_the_last(tmp_path):
    record_synchronous(tmp_path, allreduce_s=0.0605)
    link = fit(read_trace(tmp_path))
    assert link.allreduce_s == pytest.approx(0.0605, abs=1e-4)
    assert link.network.bandwidth == pytest.approx(2 * 3 / 4 * 4e6 / 0.06, rel=0.01)
    assert link.network.operation == 0.0


def test_a_network_that_is_given_is_taken(tmp_path):
    record_synchronous(tmp_path / "trace", allreduce_s=0.0605)
    file = tmp_path / "network.json"
    file.write_text('{"latency_s": 0.002, "bandwidth_bytes_s": 2e8, "by": "a user"}')
    link = fit(read_trace(tmp_path / "trace"), read_given(file))
    assert (link.network.latency, link.network.bandwidth) == (0.002, 2e8)
    assert link.network.operation == pytest.approx(0.06 - 6e6 / 2e8, abs=1e-3)
    for text, hint in (
        ('{"latency_s": 0}', "above 0, got 0"),
        ("[]", "must be JSON with latency_s or bandwidth_bytes_s"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=hint):
            read_given(file)


# -- advice ---------------------------------------------------------------------------------------------------


def prediction(risk: Risk, gain: float) -> Prediction:
    mode = YARDSTICK._replace(name=f"{risk.name} {gain}", risk=risk)
    return Prediction(mode, Spread(gain, gain, gain), Spread(gain, gain, gain), 0.0, 0, 0.0, 0.0)


def test_a_higher_risk_must_be_worth_it():
    base, late, own = prediction(Risk.NONE, 1.0), prediction(Risk.LATE, 1.5), prediction(Risk.OWN, 1.6)
    assert [each.prediction for each in choose(base, [own, late])] == [late]
    own = prediction(Risk.OWN, 1.7)
    assert [each.prediction for each in choose(base, [own, late])] == [late, own]
    assert choose(base, [prediction(Risk.NONE, 1.05), prediction(Risk.OWN, 1.05)]) == []


def test_every_mode_has_a_line_that_the_library_takes():
    lines = {each.line for each in MODES}
    assert len(lines) == len(MODES)
    for line in lines:
        name, _, arguments = line.partition("(opt, ")
        assert name in ("EagerOptimizer", "GossipOptimizer", "LeaderOptimizer")
        assert eval(f"dict({arguments}")


@pytest.mark.parametrize(
    ("algorithm", "options", "name", "risk"),
    [
        (HOROVOD, {}, "horovod", Risk.NONE),
        (FSDP, {}, "horovod", Risk.NONE),
        ("eager", {"quorum": "all"}, "all", Risk.NONE),
        ("eager", {"quorum": "solo"}, "solo", Risk.LATE),
        ("local", {"average_every": 4}, "local", Risk.OWN),
        ("adpsgd", {"average_every": 0}, "adpsgd", Risk.OWN),
        ("lsgd", {}, "lsgd", Risk.PULLED),
        ("none", {}, None, None),
        ("eager", {"quorum": 1, "local_size": 2}, None, None),  # (hosts that step together are not simulated)
        ("sgp", {"hierarchical": 2}, None, None),
    ],
)
def test_the_mode_of_a_trace_and_its_risk(algorithm, options, name, risk):
    found = mode_of(Header(1, 0, 2, "h", "torch", algorithm, options))
    assert (found and found.name, found and found.risk) == (name, risk)


def test_the_fastest_modes_get_a_closer_look_and_leaders_none(tmp_path):
    record_synchronous(tmp_path, one_random(40, 4, 0.1, 0.1, seed=0))
    lines: list[str] = []
    found = advise(read_trace(tmp_path), steps=20, resamples=3, progress=lines.append)
    assert [each.mode.risk for each in found.best].count(Risk.PULLED) == 0
    assert len(found.best) == len({each.mode.name for each in found.best}) == 4
    assert all(choice.prediction in found.best for choice in found.choices)
    assert [each.gain.mean for each in found.best] == sorted((each.gain.mean for each in found.best), reverse=True)
    assert [line.partition(" modes")[0] for line in lines] == ["simulating 13", "simulating 4"]
    only = advise(read_trace(tmp_path), modes="lsgd,easgd", steps=20, resamples=1)
    assert {each.mode.name for each in only.best} == {"lsgd", "easgd"}


@pytest.mark.parametrize(
    ("algorithm", "said", "on_gpu"),
    [
        (DDP, "the end\nno_sync(), clipping, GradScaler: docs/from_ddp.md", ""),
        (FSDP, "4 MB of weights alone", "FSDP's waits on a GPU are not"),
        (HOROVOD, "-opt = hvd.DistributedOptimizer", "--synchronize"),
        ("none", "synchronous SGD", ""),
    ],
)
def test_a_job_of_torch_is_compared_with_itself(tmp_path, algorithm, said, on_gpu):
    record_synchronous(tmp_path, algorithm=algorithm, synchronized=not on_gpu)
    found = advise(read_trace(tmp_path), modes="adpsgd", resamples=1)
    text = "\n".join(sentences(found))
    assert said in text
    assert on_gpu in " ".join(found.warnings)
    assert found.bound == pytest.approx(8.75 / 5.0, rel=0.05)
    assert ("Horovod" in text) == (algorithm == HOROVOD)
    assert found.link.network.cycle == (0.0 if algorithm in (DDP, FSDP) else 0.001)
    if algorithm != "none":
        assert found.own.steps_per_s.mean == pytest.approx(found.trace.steps_per_s, rel=0.01)


# -- commands -------------------------------------------------------------------------------------------------


def test_advise_on_the_command_line(tmp_path, capsys):
    record_synchronous(tmp_path)
    few = ["--resamples", "1", "--steps", "40"]
    assert main(["advise", str(tmp_path), *few]) == 0
    text, progress = capsys.readouterr()
    assert f"Rank 2 on host {socket.gethostname()} is slow" in text.splitlines()[0]
    assert "the job would be 1.96 times as fast, without changing a line. Of 10 hours, 4.9" in " ".join(text.split())
    assert 'named_parameters=model.named_parameters(), quorum="solo", pace="rounds")' in text
    assert "docs/choosing.md names another mode for a rank that is always slow" in " ".join(text.split())
    assert progress.count("hvd_async advise: simulating") == 1
    assert "lsgd" not in text
    assert max(map(len, text.splitlines())) <= 120
    assert main(["advise", str(tmp_path), *few, "--all"]) == 0
    text = capsys.readouterr().out
    assert "lsgd" in text
    assert "Not known:" in text
    assert max(map(len, text.splitlines())) <= 120
    assert main(["advise", str(tmp_path), *few, "--json", "--modes", "k3,solo", "--bandwidth", "1000"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["culprits"]["slow_rank"] == 2
    assert found["choices"][0]["mode"] == "quorum 3"
    assert any("Accuracy" in each for each in found["unknown"])
    assert {each["mode"] for each in found["modes"]} == {"horovod", "quorum 3", "solo"}
    assert found["network"]["bandwidth"] == 1.25e8


def test_simulate_on_the_command_line(capsys):
    job = ["--ranks", "4", "--compute", "0.1", "--slow", "2", "--megabytes", "0", "--latency", "0", "--steps", "40"]
    job += ["--repetitions", "1"]
    assert main(["simulate", *job, "--mode", "lsgd", "--json"]) == 0
    base, own = json.loads(capsys.readouterr().out)
    assert base["steps_per_s"]["mean"] == pytest.approx(5.0, rel=0.02)
    assert own["gain"]["mean"] == pytest.approx(1.75, rel=0.02)
    assert main(["simulate", *job]) == 0
    text = capsys.readouterr().out
    assert "pace rounds" in text
    assert "- 4 ranks, 1 per host, 40 steps" in text
    assert "Horovod" not in text


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("advise {} --modes k5", "no mode 'k5'"),
        ("advise {} --steps 0", "at least 1"),
        ("advise {} --latency 0", "0"),
        ("simulate --ranks 1", ""),
        ("simulate --stall-share 2", ""),
        ("simulate --mode best", ""),
    ],
)
def test_invalid_options_are_refused(tmp_path, capsys, command, said):
    record_synchronous(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(command.format(tmp_path).split())
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_plot_on_the_command_line(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    record_synchronous(tmp_path)
    picture = tmp_path / "own" / "timeline.png"
    assert main(["plot", str(tmp_path), "--out", str(picture), "--first", "50"]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        main(["plot", str(tmp_path), "--out", str(picture), "--first", "57"])
    assert "steps 0 to 56" in capsys.readouterr().err
