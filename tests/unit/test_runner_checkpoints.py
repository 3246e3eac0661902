"""Checkpoints that are damaged, or none: every rank says so, and none continues with them."""

import numpy as np
import pytest

from hvd_async.runner.loop import Trainer, World
from hvd_async.runner.report import Replicas

MADE_BY = {"model": "small"}
torch = pytest.importorskip("torch")


def load_torch(path):
    return torch.load(path, map_location="cpu", weights_only=True)


def load_numpy(path):
    with np.load(path) as file:
        return dict(file) | {"made_by": MADE_BY}


def save_numpy(content, path):
    with path.open("wb") as file:
        np.savez(file, **{name: np.asarray(value) for name, value in content.items() if name != "made_by"})


class Reader(Trainer):
    """Returns what it is to load."""

    checkpoint_suffix = ""

    def __init__(self, read, load):
        self._read, self._load = read, load

    def read(self, path):
        return self._read(path)

    def load(self, content):
        return self._load(content)

    def fingerprint(self):
        return MADE_BY

    def train_step(self, batch, rate):
        return 0.0

    def correct(self, batch):
        return 0

    def replicas(self):
        return Replicas(True, 0.0, 0.0)

    def save(self, path, position):
        pytest.fail("nothing is saved here")


def on_ranks(path, read=load_torch, load=lambda content: content, size=3):
    """What every rank gets, or its error."""
    sent, outcomes = [], []

    def gather(found, name):
        sent.append(found)
        return [sent[0], *[None] * (size - 1)]

    for rank in range(size):
        try:
            outcomes.append(Reader(read, load).restore(path, World(rank, size, gather)))
        except ValueError as error:
            outcomes.append(error)
    assert len(sent) == size, "every rank took part"
    assert sent[1:] == [None] * (size - 1), "only rank 0 reads"
    return outcomes


def errors_on_ranks(*arguments, **options):
    """The error of every rank; there must be one."""
    errors = on_ranks(*arguments, **options)
    assert all(isinstance(error, ValueError) for error in errors)
    return list(map(str, errors))


@pytest.fixture(params=["torch", "numpy"])
def kind(request):
    """How a framework saves and loads."""
    return {"torch": (torch.save, load_torch), "numpy": (save_numpy, load_numpy)}[request.param]


def test_all_ranks_have_what_rank_0_has_read(tmp_path, kind):
    save, read = kind
    save({"made_by": MADE_BY, "weights": torch.arange(10.0)}, tmp_path / "last")
    outcomes = on_ranks(tmp_path / "last", read)
    assert all(list(map(float, outcome["weights"])) == list(range(10)) for outcome in outcomes)
    assert on_ranks(tmp_path / "none", read) == [None] * 3


@pytest.mark.parametrize("place", [0.5])
def test_four_flipped_bytes_are_found(tmp_path, kind, place):
    save, read = kind
    path = tmp_path / "last"
    save({"made_by": MADE_BY, "weights": torch.rand(10_000, generator=torch.Generator().manual_seed(1))}, path)
    data = bytearray(path.read_bytes())
    at = int(len(data) * place)
    data[at : at + 4] = bytes(255 - byte for byte in data[at : at + 4])
    path.write_bytes(data)
    for error in errors_on_ranks(path, read):
        assert f"{path} " in error
        assert "checksum" in error or "cannot be read" in error
        assert "remove it, or start without --resume" in error


@pytest.mark.parametrize("share", [0.0, 0.99])
def test_a_truncated_file_is_refused(tmp_path, kind, share):
    save, read = kind
    path = tmp_path / "last"
    save({"made_by": MADE_BY, "weights": torch.rand(1000)}, path)
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    assert all("cannot be read as a checkpoint" in error for error in errors_on_ranks(path, read))


class Evil:
    def __reduce__(self):
        return (print, ("run",))


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ([1, 2], "must be a checkpoint, got a list"),
        (None, "must be a checkpoint, got a NoneType"),
        ({"made_by": {"model": "large"}}, "give the same options, or another"),
        ({}, "give the same options, or another"),
        (Evil(), "cannot be read as a checkpoint"),  # its code is not run
    ],
)
def test_what_is_no_checkpoint_of_such_a_run_is_refused(tmp_path, capsys, content, error):
    torch.save(content, tmp_path / "last")
    assert all(error in found for found in errors_on_ranks(tmp_path / "last"))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("content", [{}, {"model": [1]}])
def test_what_does_not_fit_is_an_error_on_every_rank(tmp_path, content):
    path, model = tmp_path / "last", torch.nn.Linear(1, 1)
    torch.save({"made_by": MADE_BY, **content}, path)
    for error in errors_on_ranks(path, load=lambda content: model.load_state_dict(content["model"])):
        assert f"{path} does not hold what this run needs" in error
        assert error.endswith("remove it, or start without --resume")
