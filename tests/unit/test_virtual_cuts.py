"""Links that are cut while a job runs; no link is there."""

from __future__ import annotations

import importlib
import threading
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def virtual(monkeypatch):
    """scripts/virtual_cluster.py, imported as Python does when it is run."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("virtual_cluster")


class Links:
    """Stands for a cluster; tells of what is cut."""

    def __init__(self, error=None):
        self.cuts, self.was_cut, self.error = set(), threading.Event(), error

    def cut(self, host):
        self.was_cut.set()
        if self.error is not None:
            raise self.error
        self.cuts.add(host)

    def restore(self, host):
        self.cuts.discard(host)


def test_a_link_that_is_cut_when_the_job_ends_is_restored(virtual):
    links = Links()
    with virtual.cutting(links, [virtual.Cut(1, 0.0, 600.0)]):
        assert links.was_cut.wait(10.0)
    assert links.cuts == set()


def test_a_cut_that_fails_is_an_error(virtual):
    links = Links(virtual.ClusterError("no such device"))
    with (
        pytest.raises(virtual.ClusterError, match="no such device"),
        virtual.cutting(links, [virtual.Cut(0, 0.0, 1.0)]),
    ):
        assert links.was_cut.wait(10.0)


@pytest.mark.parametrize("text", ["0:nan:1", "0:1:inf", "0:-1:1"])
def test_a_time_that_never_comes_is_refused(virtual, text):
    with pytest.raises(Exception, match="is not HOST:AFTER:SECONDS"):
        virtual.Cut.parse(text)
