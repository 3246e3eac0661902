"""States that are saved and resumed in every way, and steps by which other libraries make a state."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.optim import named_optimizer

import hvd_async.tensorflow.keras as hvd_keras
import hvd_async.torch as hvd
from hvd_async.runtime.lifecycle import local_engine
from hvd_async.tensorflow.checkpoint import is_share
from hvd_async.testing import Cluster
from hvd_async.torch import functions
from tests.conformance.elastic_board import Board, Exchange, keras_callbacks_over_a_board, over_a_board
from tests.conformance.gossip_ranks import DILOCO, EXACT, LOCAL, PAIRED, SLOWMO
from tests.conformance.model_ranks import KerasModel, TorchModel
from tests.conformance.torch_ranks import flat
from tests.conformance.weight_ranks import KerasRank, TorchRank, both, values
from tests.conftest import LONG_RUN
from tests.covering import covering


def by_step(step: int) -> float:
    """Return a strength that depends on the step."""
    return 0.5 / (1 + step)


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "all": ("EagerOptimizer", {"quorum": "all"}),
    "solo": ("EagerOptimizer", {"quorum": "solo", "max_staleness": 0}),
    "predicted": ("EagerOptimizer", {"quorum": "all", "weight_prediction": 2, "max_staleness": 2}),
    "sgp": ("GossipOptimizer", {"algorithm": "sgp", "topology": "star", "gossip_every": 3}),
    "dpsgd": ("GossipOptimizer", {"algorithm": "dpsgd", "topology": "ring", "quasi_global": True}),
    "osgp": ("GossipOptimizer", {"algorithm": "osgp", "max_staleness": 1}),
    "adpsgd": ("GossipOptimizer", {"algorithm": "adpsgd", "topology": "ring"}),
    "exact-diffusion": ("GossipOptimizer", EXACT | {"gossip_every": 2, "compression": "int8"}),
    "noloco": ("GossipOptimizer", PAIRED),
    "local": ("GossipOptimizer", {"algorithm": "local", "average_every": 2}),
    "slowmo": ("GossipOptimizer", SLOWMO | {"compression": "bf16"}),
    "diloco": ("GossipOptimizer", DILOCO | {"compression": "int8"}),
    "hosts": ("GossipOptimizer", {"algorithm": "sgp", "hierarchical": 3, "compression": "int8", "average_every": 3}),
    "lsgd": ("LeaderOptimizer", {"algorithm": "lsgd", "group": 1, "global_period": 2, "global_pull": by_step}),
    "easgd": ("LeaderOptimizer", {"algorithm": "easgd", "global_period": 2}),
}
MIXED = [name for name, (wrapper, _) in FAMILIES.items() if wrapper != "EagerOptimizer"]
"""Families whose ranks have weights of their own."""

# -- steps that train nothing -------------------------------------------------------------------------------------

MODES = ("all", "solo", "sgp", "adpsgd", "diloco", "noloco", "lsgd", "easgd")
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "dampened": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, dampening=0.5),
    "adam": lambda p: torch.optim.AdamW(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


def get_and_set(model: Any, opt: Any) -> None:
    """Load what the state is again."""
    weights, state = dcp.get_state_dict(model, opt)
    dcp.set_state_dict(model, opt, model_state_dict=weights, optim_state_dict=state)


def get_flat(model: Any, opt: Any) -> None:
    """Get the states for a pipeline."""
    dcp.get_state_dict(model, opt, options=dcp.StateDictOptions(flatten_optimizer_state_dict=True))


def dummy_step(model: Any, opt: Any) -> None:
    """Make a state as a library does that knows no other way."""
    if opt.state:
        return
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    rate, opt.param_groups[0]["lr"] = opt.param_groups[0]["lr"], 0.0
    opt.step()
    opt.param_groups[0]["lr"] = rate
    opt.zero_grad()


def named(model: Any, opt: Any) -> None:
    """Make a state as torch does for optimizers that name their state by parameters."""
    if not opt.state:
        named_optimizer._NamedOptimizer(model.named_parameters(), lambda _: opt).init_state()
        opt.zero_grad()


CALLS: dict[str, Any] = {
    "named": named,
    "get": dcp.get_optimizer_state_dict,
    "flat": get_flat,
    "set": get_and_set,
    "step": dummy_step,
}


@pytest.mark.parametrize(
    ("mode", "optimizer", "call", "ranks", "before"),
    [
        (mode, optimizer, call, (0, 1) if call == "set" else ranks, before)
        for mode, optimizer, call, ranks, before in covering(
            (MODES, tuple(OPTIMIZERS), tuple(CALLS), ((0,), (0, 1)), (True, False)), 2
        )
        if call != "set" or optimizer not in ("rprop", "dampened")  # (what a first step makes is not torch's zeros)
    ],
    ids=str,
)
def test_a_step_that_makes_a_state_is_none(mode, optimizer, call, ranks, before):
    """Weights and counts are those of a run in which no rank saves, also before the ranks have met."""
    wrapper, options = FAMILIES[mode]

    def train(rank: int, saves: bool) -> Any:
        one = TorchModel(wrapper, np.full((3, 1), 0.5), make=OPTIMIZERS[optimizer], **options)

        def save() -> None:
            if saves and rank in ranks:
                CALLS[call](one.model, one.opt)

        if before:
            save()
        for step in range(6):
            if step == 4:
                one.opt.drain()
                one.opt.zero_grad()
                save()
            one.take(np.full((2, 3), 0.5 + 0.1 * step))
        one.opt.drain()
        return one.weights(), one.opt.stats().steps, one.opt.rounds

    whole = Cluster(2).run(lambda rank: train(rank, False))
    for own, saved in zip(whole, Cluster(2).run(lambda rank: train(rank, True)), strict=True):
        assert saved[1] == own[1] == 6
        assert mode != "all" or saved[2] == own[2]
        if mode not in ("solo", "adpsgd", "lsgd", "easgd"):  # (which rank leads, or meets which one, varies)
            np.testing.assert_allclose(saved[0], own[0], rtol=1e-5)


# -- averages of schedule-free optimizers -------------------------------------------------------------------------


@both
@pytest.mark.parametrize("family", [name for name in MIXED if name != "dpsgd"])  # (which has to correct a momentum)
def test_averages_of_a_schedule_free_optimizer_agree_after_a_drain(binding, family):
    wrapper, options = FAMILIES[family]

    def train(rank: int) -> Any:
        problem = binding.least_squares(3)
        one = binding(problem, rank, wrapper=wrapper, make=binding.schedule_free, **options).train(4 + rank)
        one.opt.drain()
        if binding is TorchRank:
            one.opt.eval()
            return one.weights().tobytes()
        return one.weights().tobytes(), np.asarray(one.opt._momentums[0]).tobytes()

    assert len(set(Cluster(3).run(train))) == 1


@both
def test_schedule_free_optimizers_work_on_biased_weights(binding):
    """On a star the push-sum weights are not 1. Without gradients nothing moves."""

    def train(rank: int) -> Any:
        one = binding(binding.least_squares(3), rank, make=binding.schedule_free, algorithm="sgp", topology="star")
        one.assign(np.ones(6))
        if binding is KerasRank:
            for v, z in zip(one.parameters, one.opt._momentums, strict=True):
                z.assign(v)
        for _ in range(5):
            one.take(np.zeros(6))
        assert one.opt.stats().push_sum_weight != 1.0
        return one.weights()

    for weights in Cluster(3).run(train):
        np.testing.assert_allclose(weights, 1.0, rtol=1e-5)


# -- states in every form -----------------------------------------------------------------------------------------


REPEATABLE = ("all", "predicted", "sgp", "dpsgd", "exact-diffusion", "noloco", "local", "slowmo", "diloco", "hosts")
"""Families in which a run is the same each time."""
RANKS, BEFORE, AFTER = 3, 5, 5
"""Ranks that save, and steps before and after that."""


def start(seed: int) -> Any:
    """Return weights to begin with."""
    return np.random.default_rng(seed).normal(size=(3, 2)).astype(np.float32)


def train(one: Any, steps: range) -> Any:
    """Take steps; the rate falls, and a state brings it back."""
    rank = local_engine().rank  # type: ignore[union-attr]
    for step in steps:
        one.take(np.random.default_rng([rank, step]).normal(size=(4, 3)).astype(np.float32))
        one.set_rate(0.9 * one.rate())
    return one


def held(one: Any) -> Any:
    """Return all but weights and rate that a state must bring back: what the algorithm keeps, and the momentum."""
    share = one.opt._async.share()
    pending = {"pending": sum(map(len, share.pop("versions", ()))), "momentum": one.moments()}
    return pending | {name: values(share[name]) for name in share.keys() - {"size", "index", "rounds", "vectors"}}


class TorchResuming(TorchModel):
    """A rank's script in torch, which saves and resumes; ``FORMS`` are the ways to."""

    FORMS = ("state_dict", "dcp", "elastic")

    def save(self, form: str, folder: Path) -> None:
        if form == "dcp":
            weights, state = dcp.get_state_dict(self.model, self.opt)
            checkpoint.save({"weights": weights, "state": state}, checkpoint_id=folder, no_dist=True)
        else:
            folder.mkdir()
            torch.save((self.model.state_dict(), self.opt.state_dict()), folder / "file")

    def load(self, form: str, folder: Path) -> None:
        if form == "dcp":
            weights, state = dcp.get_state_dict(self.model, self.opt)
            found = {"weights": weights, "state": state}
            checkpoint.load(found, checkpoint_id=folder, no_dist=True)
            dcp.set_state_dict(self.model, self.opt, model_state_dict=found["weights"], optim_state_dict=found["state"])
            return
        weights, state = torch.load(folder / "file", weights_only=True)
        self.model.load_state_dict(weights)
        self.opt.load_state_dict(state)

    def broadcast(self, form: str) -> None:
        if form == "elastic":
            hvd.elastic.TorchState(model=self.model, optimizer=self.opt).sync()
            return
        received = Exchange().object_of(0, flat(self.model.parameters()), "weights")
        with torch.no_grad():
            self.model.weight.copy_(torch.as_tensor(received).view_as(self.model.weight))
        hvd.broadcast_optimizer_state(self.opt, root_rank=0)


class KerasResuming(KerasModel):
    """The same in Keras."""

    FORMS = ("get_state", ".keras", "BackupAndRestore", "ModelCheckpoint", "elastic")

    def _callback(self, form: str, folder: Path) -> Any:
        if form == "BackupAndRestore":
            made: Any = keras.callbacks.BackupAndRestore(str(folder))
        else:
            made = keras.callbacks.ModelCheckpoint(str(folder / "model.keras"))
        made.set_model(self.model)
        return made

    def save(self, form: str, folder: Path) -> None:
        folder.mkdir()
        if form in ("BackupAndRestore", "ModelCheckpoint"):
            self._callback(form, folder).on_epoch_end(0, {})
        elif form == ".keras":
            self.model.save(folder / "model.keras")
        else:
            np.savez(folder / "state.npz", **self.opt.get_state())
            np.save(folder / "weights.npy", self.weights())

    def load(self, form: str, folder: Path) -> None:
        if form == "BackupAndRestore":
            self._callback(form, folder).on_train_begin()
        elif form in (".keras", "ModelCheckpoint"):
            self.model = hvd_keras.load_model(
                folder / "model.keras", wrapper=getattr(hvd_keras, self.wrapper), **self.options
            )
        else:
            with np.load(folder / "state.npz", allow_pickle=False) as arrays:
                self.opt.set_state(dict(arrays))
            self.model.layers[1].kernel.assign(np.load(folder / "weights.npy").reshape(3, 2))

    def broadcast(self, form: str) -> None:
        if form == "elastic":
            hvd_keras.elastic.KerasState(self.model, self.opt).sync()
            return
        callback = hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)
        callback.set_model(self.model)
        callback.on_train_begin()


BINDINGS: dict[str, Any] = {"torch": TorchResuming, "keras": KerasResuming}
WHO = ("rank 0 with broadcasts", "all ranks", "another size")
FORMS = [(name, form) for name, binding in BINDINGS.items() for form in binding.FORMS]
OWN = [(name, form) for name, form in FORMS if form != "elastic"]
"""Ways of saving a state that is each rank's own."""
CELLS = dict.fromkeys(
    [
        *((family, OWN[place % len(OWN)], "cut", "all ranks") for place, family in enumerate(FAMILIES)),
        *(
            (family, form, end, "all ranks" if family == "hosts" else who)  # (one host of three)
            for family, form, end, who in covering(
                (tuple(FAMILIES), FORMS, ("drain", "cut"), WHO), 3 if LONG_RUN else 2
            )
        ),
    ]
)
"""Each family resumes at least once from what each rank has saved after a cut."""


@pytest.fixture
def over_collectives(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have broadcasts of ranks in threads go over a board."""

    def object_of(root: int, value: Any, name: str = "") -> Any:
        return Exchange().object_of(root, value, name)

    monkeypatch.setattr(functions, "_object_of", object_of)
    monkeypatch.setattr(functions, "_tensors_of", object_of)
    monkeypatch.setattr(functions.hvd, "allgather_object", lambda value, name: Exchange().everyones(value, name))
    monkeypatch.setattr(functions.hvd, "rank", lambda: Exchange().rank)
    keras_callbacks_over_a_board(monkeypatch)
    monkeypatch.setattr("horovod.tensorflow.rank", lambda: Exchange().rank)
    monkeypatch.setattr("horovod.tensorflow.size", lambda: Exchange().size)
    with over_a_board():
        yield


@pytest.mark.usefixtures("over_collectives")
@pytest.mark.parametrize(("family", "form", "end", "who"), CELLS, ids=str)
@pytest.mark.filterwarnings("ignore:after cut", "ignore:__array__:DeprecationWarning")
def test_a_saved_state_resumes(family, form, end, who, tmp_path):
    """After ``drain()`` rank 0's, after ``cut()`` each rank's own: weights, momentum, rate, rounds and all that the
    algorithm keeps are those of the undisturbed run, which continues; the wrong use of a cut is an error."""
    (binding, how), (wrapper, options) = form, FAMILIES[family]
    # (A drain leaves to ranks with weights of their own a momentum of their own, which rank 0's state has not.)
    alone = family in MIXED and family != "dpsgd" and end == "drain"
    momentum = 0.0 if alone and who != "another size" else 0.5

    def make(seed: int) -> Any:
        return BINDINGS[binding](wrapper, start(seed), momentum, **options)

    def undisturbed(rank: int) -> Any:
        one = train(make(1), range(BEFORE))
        getattr(one.opt, end)()
        rounds = one.opt.rounds
        one.save(how, tmp_path / str(rank))
        saved = one.weights(), one.rate(), held(one), range(rounds, one.opt.rounds + 1)
        train(one, range(BEFORE, BEFORE + AFTER)).opt.drain()
        return saved, one.weights()

    whole = Cluster(RANKS).run(undisturbed)
    size = RANKS - 1 if who == "another size" else RANKS
    Exchange.board = Board(size)

    def resumed(rank: int) -> Any:
        one, sends = make(2), who == "rank 0 with broadcasts" or how == "elastic"
        if rank == 0 or not sends:
            one.load(how, tmp_path / str(rank if end == "cut" else 0))
        if sends:
            one.broadcast(how)
        began = one.weights(), one.rate(), held(one), one.opt.rounds
        train(one, range(BEFORE, BEFORE + AFTER)).opt.drain()
        return began, one.weights()

    needs_all = end == "cut" and family in MIXED
    if needs_all and (who != "all ranks" or how == "elastic"):
        outcomes = Cluster(size).outcomes(resumed)
        assert all(isinstance(one, Exception) for one in outcomes)
        assert any("after cut()" in str(one) for one in outcomes)
        return
    ends = Cluster(size).run(resumed)
    assert len({ended.tobytes() for _, ended in ends}) == 1
    for rank, (began, ended) in enumerate(ends):
        weights, rate, kept, rounds = whole[rank if end == "cut" else 0][0]
        np.testing.assert_array_equal(began[0], weights)
        assert began[1] == pytest.approx(rate)
        assert began[2] == kept
        assert began[3] in rounds  # (the last exchanges may be counted while a file is written)
        if size == RANKS and family in REPEATABLE:
            np.testing.assert_allclose(ended, whole[rank][1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("binding", BINDINGS)
def test_a_state_without_outer_momentum_is_loaded_with_a_warning(binding):
    """A plain optimizer's, and what is left of a state for pipelines by torch.distributed.checkpoint."""

    def begin(rank: int) -> None:
        for family, warns in (("slowmo", True), ("sgp", False), ("all", False)):
            wrapper, options = FAMILIES[family]
            opt = BINDINGS[binding](wrapper, start(1), **options).opt
            state = opt.state_dict() if binding == "torch" else opt.get_state()
            plain = {name: value for name, value in state.items() if name != "hvd_async" and not is_share(str(name))}
            with pytest.warns(UserWarning, match="no outer momentum") if warns else contextlib.nullcontext():
                opt.load_state_dict(plain) if binding == "torch" else opt.set_state(plain)

    Cluster(1).run(begin)


def test_a_keras_file_that_is_saved_in_mid_training_says_what_it_lacks(tmp_path):
    taken = threading.Barrier(2)

    def work(rank: int) -> None:
        one = train(KerasResuming("GossipOptimizer", start(1), **LOCAL), range(3))
        taken.wait(60)
        if rank == 0:
            with pytest.warns(UserWarning, match="saved is incomplete.*on their way.*drain"):
                one.save(".keras", tmp_path / "file")
        taken.wait(60)
        one.opt.drain()

    Cluster(2).run(work)
