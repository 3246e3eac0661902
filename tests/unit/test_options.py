"""Arguments that cannot be are refused with ValueError and a hint."""

from __future__ import annotations

import pytest

from hvd_async.options import check_eager_options, refuse


@pytest.mark.parametrize("max_staleness", [-1, 1.0, "2", None, True])
def test_wrong_staleness(max_staleness):
    with pytest.raises(ValueError, match=r"max_staleness=.* is not a number of rounds: take 0 \(synchronous\) or more"):
        check_eager_options("solo", max_staleness, 0.0, "average", 4)


@pytest.mark.parametrize("grace", [-0.1, float("inf"), float("nan"), "1", None, True])
def test_wrong_grace(grace):
    with pytest.raises(ValueError, match=r"grace=.* is not a number of seconds: take 0.0 or more"):
        check_eager_options("solo", 1, grace, "average", 4)


def test_wrong_quorum():
    with pytest.raises(ValueError, match="quorum=9 of 4 ranks cannot be"):
        check_eager_options(9, 1, 0.0, "average", 4)


@pytest.mark.parametrize(
    ("quorum", "max_staleness", "grace"), [("solo", 0, 0), ("all", 16, 0.5), (0.5, 1, 3), (4, 2, 0.0)]
)
def test_right_ones(quorum, max_staleness, grace):
    check_eager_options(quorum, max_staleness, grace, "local", 4)


def test_refuse():
    anything = object()
    refuse(op=(anything, anything), groups=(None, None), factor=(1, 1.0))
    with pytest.raises(ValueError, match="groups=3 is not supported by this version of EagerOptimizer: leave it out"):
        refuse(op=(anything, anything), groups=(3, None))


def test_wrong_buffers():
    with pytest.raises(ValueError, match="take one of 'average', 'local', 'root'"):
        check_eager_options("solo", 1, 0.0, "mean", 4)
