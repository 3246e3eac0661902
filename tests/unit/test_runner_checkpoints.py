"""Checkpoints that are damaged, or none: every rank says so, and none continues with them."""

import pytest

from hvd_async.runner.loop import Trainer
from tests.unit.test_runner_loop import Job

MADE_BY = {"model": "small"}
torch = pytest.importorskip("torch")


class Reader(Trainer):
    """Only reads; returns what it is to load, or loads it into a model."""

    def __init__(self, rank, model):
        self._rank, self._model = rank, model

    def read(self, path):
        assert self._rank == 0, "the others get what it has read"
        return torch.load(path, map_location="cpu", weights_only=True)

    def load(self, content):
        return content if self._model is None else self._model.load_state_dict(content["model"])

    def fingerprint(self):
        return MADE_BY


Reader.__abstractmethods__ = frozenset()  # (it neither trains nor saves)


def on_ranks(path, model=None):
    """Return the result of each of three ranks, or its error as text."""
    job = Job(3)

    def restore(rank):
        try:
            return Reader(rank, model).restore(path, job.world(rank))
        except ValueError as error:
            return str(error)

    return job.run(restore)


def test_all_ranks_have_what_rank_0_has_read(tmp_path):
    torch.save({"made_by": MADE_BY, "weights": torch.arange(10.0)}, tmp_path / "last")
    assert [outcome["weights"].tolist() for outcome in on_ranks(tmp_path / "last")] == [[*range(10)]] * 3
    assert on_ranks(tmp_path / "none") == [None] * 3


class Evil:
    def __reduce__(self):
        return (print, ("run",))


def flip_bytes(data):
    at = len(data) // 2
    return data[:at] + bytes(255 - byte for byte in data[at : at + 4]) + data[at + 4 :]


WHOLE = {"made_by": MADE_BY, "weights": torch.zeros(10_000)}
REMOVE = "remove it, or start without --resume"


@pytest.mark.parametrize(
    ("content", "spoil", "error", "advice"),
    [
        (WHOLE, flip_bytes, "is damaged, its part last/data/0 has a wrong checksum", REMOVE),
        (WHOLE, lambda data: b"", "cannot be read as a checkpoint", REMOVE),
        (WHOLE, lambda data: data[:-500], "cannot be read as a checkpoint", REMOVE),
        (Evil(), None, "cannot be read as a checkpoint", REMOVE),  # its code is not run
        ([1, 2], None, "must be a checkpoint, got a list", REMOVE),
        (None, None, "must be a checkpoint, got a NoneType", REMOVE),
        ({"made_by": {"model": "large"}}, None, "", "give the same options, or another --checkpoint-dir"),
        ({}, None, "", "give the same options, or another --checkpoint-dir"),
        ({"made_by": MADE_BY}, None, "does not hold what this run needs", REMOVE),
        ({"made_by": MADE_BY, "model": [1]}, None, "does not hold what this run needs", REMOVE),
    ],
)
def test_what_is_no_checkpoint_of_such_a_run_is_refused_by_every_rank(tmp_path, capsys, content, spoil, error, advice):
    path = tmp_path / "last"
    torch.save(content, path)
    if spoil is not None:
        path.write_bytes(spoil(path.read_bytes()))
    for found in on_ranks(path, torch.nn.Linear(1, 1)):
        assert found.startswith(f"{path} ")
        assert error in found
        assert found.endswith(advice)
    assert capsys.readouterr().out == ""
