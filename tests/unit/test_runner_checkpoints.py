"""Checkpoints that are damaged, or none: every rank says so, and none goes on with them."""

import io
import zipfile

import numpy as np
import pytest

from hvd_async.runner.metrics import Replicas
from hvd_async.runner.trainer import Trainer, World

MADE_BY = {"model": "small"}
torch = pytest.importorskip("torch")


def load_torch(path):
    return torch.load(path, map_location="cpu", weights_only=True)


def load_numpy(path):
    with np.load(path) as file:
        return dict(file) | {"made_by": MADE_BY}


def save_torch(content, path):
    torch.save(content, path)


def save_numpy(content, path):
    with path.open("wb") as file:
        np.savez(file, **{name: np.asarray(value) for name, value in content.items() if name != "made_by"})


KINDS = {"torch": (save_torch, load_torch), "numpy": (save_numpy, load_numpy)}


class Reader(Trainer):
    """Gives back what it is to load."""

    checkpoint_suffix = ""

    def __init__(self, read, load=lambda content: content):
        self._read, self._load = read, load

    def read(self, path):
        return self._read(path)

    def load(self, content):
        return self._load(content)

    def made_by(self):
        return MADE_BY

    def train_step(self, batch, rate):
        return 0.0

    def correct(self, batch):
        return 0

    def replicas(self):
        return Replicas(True, 0.0, 0.0)

    def save(self, path, position):
        pytest.fail("nothing is saved here")


def on_ranks(path, read, size=3, **options):
    """What every rank gets, or its error."""
    told, outcomes = [], []

    def gather(found, name):
        told.append(found)
        return [told[0], *[None] * (size - 1)]

    for rank in range(size):
        try:
            outcomes.append(Reader(read, **options).restore(path, World(rank, size, gather)))
        except ValueError as error:
            outcomes.append(str(error))
    assert len(told) == size, "every rank took part"
    assert told[1:] == [None] * (size - 1), "only rank 0 reads"
    return outcomes


@pytest.fixture(params=KINDS)
def kind(request):
    """How a framework saves and loads."""
    return KINDS[request.param]


def test_all_ranks_have_what_rank_0_has_read(tmp_path, kind):
    save, read = kind
    save({"made_by": MADE_BY, "weights": torch.arange(10.0)}, tmp_path / "last")
    outcomes = on_ranks(tmp_path / "last", read)
    assert all(list(map(float, outcome["weights"])) == list(range(10)) for outcome in outcomes)


def test_there_is_none(tmp_path):
    assert on_ranks(tmp_path / "last", load_torch) == [None] * 3


@pytest.mark.parametrize("place", [0.3, 0.5, 0.6])
def test_four_flipped_bytes_are_found(tmp_path, kind, place):
    save, read = kind
    path = tmp_path / "last"
    save({"made_by": MADE_BY, "weights": torch.rand(10_000, generator=torch.Generator().manual_seed(1))}, path)
    data = bytearray(path.read_bytes())
    at = int(len(data) * place)
    data[at : at + 4] = bytes(255 - byte for byte in data[at : at + 4])
    path.write_bytes(data)
    for said in on_ranks(path, read):
        assert f"{path} " in said
        assert "checksum" in said or "cannot be read" in said
        assert "remove it, or start without --resume" in said


@pytest.mark.parametrize("length", [0, 1, 100, 0.5, 0.99])
def test_a_file_that_was_cut_is_refused(tmp_path, kind, length):
    save, read = kind
    path = tmp_path / "last"
    save({"made_by": MADE_BY, "weights": torch.rand(1000)}, path)
    data = path.read_bytes()
    path.write_bytes(data[: int(length * len(data)) if isinstance(length, float) else length])
    assert all("cannot be read as a checkpoint" in said for said in on_ranks(path, read))


@pytest.mark.parametrize("content", [[1, 2], 3.0, "text", None, torch.ones(2)])
def test_what_is_no_checkpoint_is_refused(tmp_path, content):
    save_torch(content, tmp_path / "last")
    assert all("is no checkpoint, it holds a " in said for said in on_ranks(tmp_path / "last", load_torch))


def test_one_of_other_options_is_refused(tmp_path):
    for made_by in ({"model": "large"}, None, [1]):
        save_torch({"made_by": made_by}, tmp_path / "last")
        assert all("give the same options, or another" in said for said in on_ranks(tmp_path / "last", load_torch))


def test_code_in_a_file_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (print, ("run",))

    torch.save(Evil(), tmp_path / "last")
    assert all("cannot be read as a checkpoint" in said for said in on_ranks(tmp_path / "last", load_torch))


def test_a_zip_of_something_else_is_refused(tmp_path, kind):
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        archive.writestr("readme", "hello")
    (tmp_path / "last").write_bytes(held.getvalue())
    assert all(isinstance(said, str) or "weights" not in said for said in on_ranks(tmp_path / "last", kind[1]))


@pytest.mark.parametrize("content", [{}, {"model": 1}, {"model": [1]}, {"model": {"weight": "text"}}])
def test_what_does_not_fit_is_told_on_every_rank(tmp_path, content):
    path, model = tmp_path / "last", torch.nn.Linear(1, 1)
    save_torch({"made_by": MADE_BY, **content}, path)
    for said in on_ranks(path, load_torch, load=lambda content: model.load_state_dict(content["model"])):
        assert f"{path} does not hold what this run needs" in said
        assert said.endswith("remove it, or start without --resume")
