"""``LeaderOptimizer`` refuses what it cannot do with a hint, on every rank, and accepts what has no meaning."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import hvd_async
from hvd_async.errors import NotInitializedError
from hvd_async.runtime.lifecycle import local_engine, use_engine
from tests.conformance.drive import scripted_engine
from tests.conformance.leader_cases import DEFAULT, REFUSED
from tests.conformance.leader_ranks import BINDINGS, TorchRank

EVERYONE, ALONE = [[0, 1, 2, 3]], [[0], [1], [2], [3]]


@BINDINGS
@pytest.mark.parametrize(
    ("options", "hint"),
    [
        *REFUSED,
        ({"group": lambda binding: [binding.process_set(0, 1), binding.process_set(2)]}, r"must be in one group"),
        ({"compression": lambda binding: binding.hvd.Compression.fp16}, r"compression: a leader's weights travel"),
        ({"compression": lambda binding: binding.hvd.Compression.int8}, r"a leader's weights travel as they are"),
        ({"op": lambda binding: binding.horovod.Sum}, r"leave op out, or take hvd\.Average"),
        ({"op": lambda binding: binding.horovod.Adasum}, r"leave op out"),
        ({"process_set": lambda binding: binding.horovod.ProcessSet([0, 1])}, r"pass it to hvd.init\(process_sets"),
    ],
)
def test_wrong_arguments_are_refused_with_a_hint_on_every_rank(binding, options, hint):
    """Without a word of gossip: who uses this wrapper need not know the other."""
    given = {
        n: v(binding) if n in ("group", "compression", "op", "process_set") and callable(v) else v
        for n, v in options.items()
    }
    group = {} if options.get("algorithm") == "easgd" else {"group": 2}
    for rank in (0, 3):  # (an engine that can do nothing: nothing is said to anybody)
        with scripted_engine(4, rank), pytest.raises(ValueError, match=hint) as caught:
            binding.hvd.LeaderOptimizer(binding.plain(), **group | given)
        assert "gossip" not in str(caught.value)


@BINDINGS
def test_what_has_no_meaning_or_horovods_is_accepted(binding):
    hvd, sets = binding.hvd, [binding.process_set(0, 3), binding.process_set(1, 2)]
    accepted = [
        ({"group": 4, "sparse_as_dense": True, "backward_passes_per_step": 4}, EVERYONE),
        ({"group": 4, "compression": binding.horovod.Compression.none, "op": hvd.Average}, EVERYONE),
        ({"algorithm": "easgd", "compression": hvd.Compression.none}, EVERYONE),
        ({"group": 1, "local_pull": lambda step: 0.5 / step, "global_prox": 0}, ALONE),
        ({"group": sets}, [[0, 3], [1, 2]]),
    ]
    for options, groups in accepted:
        with scripted_engine(4):
            assert hvd_async.LeaderOptimizer(binding.plain(), **options).settings["groups"] == groups


@BINDINGS
@pytest.mark.parametrize(("options", "config"), DEFAULT)
def test_defaults_by_horovods_hosts(binding, options, config, monkeypatch):
    for name, value in {"size": 4, "local_size": 2, "cross_size": 2}.items():
        monkeypatch.setattr(binding.horovod, name, lambda value=value: value)
    for name, value in {"rank": lambda r: r, "local_rank": lambda r: r % 2, "cross_rank": lambda r: r // 2}.items():
        monkeypatch.setattr(binding.horovod, name, lambda value=value: value(local_engine().rank))  # type: ignore[union-attr]
    for rank in range(4):
        with use_engine(SimpleNamespace(rank=rank, size=4)):  # type: ignore[arg-type]
            settings = binding.hvd.LeaderOptimizer(binding.plain(), **options)._async
        own = settings.config
        assert (own.algorithm, own.groups, own.local_period, own.global_period) == config
        easgd = "algorithm" in options
        assert settings.window == (1 if easgd else 10)
        names = ("local_pull", "global_pull", "local_prox", "global_prox")
        alpha = {"alpha": 0.43 / 4 if easgd else 0.0, "beta": 0.43}
        assert vars(settings.strengths) == dict.fromkeys(names, 0.1) | alpha


@BINDINGS
def test_optimizers_that_cannot_be_wrapped(binding):
    hvd, wrappers = binding.hvd, ("LeaderOptimizer", "GossipOptimizer", "EagerOptimizer")
    with scripted_engine(2):
        for inner in wrappers:
            wrapped = getattr(hvd, inner)(binding.plain(), **{"group": 1} if inner == "LeaderOptimizer" else {})
            for outer in wrappers:
                with pytest.raises(ValueError, match="already: wrap the plain one"):
                    getattr(hvd, outer)(wrapped)
        with pytest.raises(ValueError, match=r"no torch optimizer: pass one|no Keras 3 optimizer"):
            hvd.LeaderOptimizer(object(), group=1)
    with pytest.raises(NotInitializedError, match=r"call hvd.init\(\) first"):
        hvd.LeaderOptimizer(binding.plain())


def test_ranks_outside_of_a_process_set_need_not_fit_its_groups():
    members = TorchRank.process_set(0, 2, 3)
    sets = [TorchRank.process_set(2, 0), TorchRank.process_set(3)]
    for rank in range(4):
        for group in (3, 1, [[0, 2], [3]], sets, [[0, 2, 3]], 2, [[0, 1], [2, 3]], "host"):
            wrong = group in (2, [[0, 1], [2, 3]], "host")
            with scripted_engine(4, rank):
                make = TorchRank.hvd.LeaderOptimizer
                if wrong and rank != 1:
                    with pytest.raises(ValueError, match=r"do not divide|must be in one group|that are inside"):
                        make(TorchRank.plain(), process_set=members, group=group)
                    continue
                config = make(TorchRank.plain(), process_set=members, group=group)._async.config
            assert sorted(place for places in config.groups for place in places) == ([0] if rank == 1 else [0, 1, 2])
