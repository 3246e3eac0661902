import importlib
import pathlib

import pytest

from hvd_async.runner.leading import write_leaders

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"
PULLS = [(10.0, 0, 1), (10.2, 1, 3), (11.0, -1, 3), (12.0, 0, 0), (13.5, -1, 0)]


@pytest.fixture
def plot(monkeypatch):
    """scripts/plot.py, imported as Python does when it is run."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("plot")


def test_who_led_is_drawn_from_what_a_runner_wrote(plot, tmp_path, capsys):
    write_leaders(tmp_path / "leaders.csv", [PULLS])
    pulls = plot.read_leaders(tmp_path / "leaders.csv")
    assert pulls == [(0.0, 0, 1), (0.2, 1, 3), (1.0, -1, 3), (2.0, 0, 0), (3.5, -1, 0)]
    plot.main([str(tmp_path / "leaders.csv"), "--plot", str(tmp_path / "leaders.png")])
    assert (tmp_path / "leaders.png").read_bytes().startswith(b"\x89PNG")
    assert "wrote" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "arguments", "told"),
    [
        ("a,b\n1,2\n", [], "is no leaders.csv"),
        ("time_s,group,leader\n", [], "nobody led"),
        ("time_s,group,leader\n0.0,,\n", [], "nobody led"),
        ("time_s,group,leader\n0.0,,3\n", ["--ranks", "2"], "rank 3 led in that run; give 4 or more"),
    ],
)
def test_what_cannot_be_drawn_says_so(plot, tmp_path, capsys, text, arguments, told):
    (tmp_path / "leaders.csv").write_text(text)
    with pytest.raises(SystemExit) as stopped:
        plot.main([str(tmp_path / "leaders.csv"), *arguments, "--plot", str(tmp_path / "no.png")])
    assert stopped.value.code == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "no.png").exists()
