"""Arguments that cannot be are refused with ValueError and a hint."""

from __future__ import annotations

import pytest

from hvd_async.optimizers.horovod_options import check_eager_options, check_passes, scales


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


def test_wrong_buffers():
    with pytest.raises(ValueError, match="take one of 'average', 'local', 'root'"):
        check_eager_options("solo", 1, 0.0, "mean", 4)


@pytest.mark.parametrize("bucket_cap_mb", [0, -1, "25", None, True, float("nan")])
def test_wrong_bucket_cap(bucket_cap_mb):
    with pytest.raises(ValueError, match=r"bucket_cap_mb=.* is not a size in MiB: take a number above 0, 25 is usual"):
        check_eager_options("solo", 1, 0.0, "average", 4, bucket_cap_mb=bucket_cap_mb)


@pytest.mark.parametrize("pace", ["round", "", None, 1, True])
def test_wrong_pace(pace):
    with pytest.raises(ValueError, match=r"pace=.* is not known: take one of 'steps', 'rounds'"):
        check_eager_options("solo", 1, 0.0, "average", 4, pace=pace)


@pytest.mark.parametrize(("quorum", "max_staleness"), [("all", 16), ("solo", 0), (2, 0)])
def test_pace_rounds_wants_rounds_that_do_not_wait_for_all(quorum, max_staleness):
    with pytest.raises(ValueError, match='take pace="steps", or a quorum that does not wait for all'):
        check_eager_options(quorum, max_staleness, 0.0, "average", 4, pace="rounds")
    check_eager_options(quorum, max_staleness, 0.0, "average", 4, pace="steps")


def test_right_pace():
    check_eager_options("auto", 16, 0.0, "average", 4, pace="rounds", bucket_cap_mb=0.5)


@pytest.mark.parametrize("nonfinite", ["ignore", None, True])
def test_wrong_nonfinite(nonfinite):
    with pytest.raises(ValueError, match="take one of 'skip', 'raise'"):
        check_eager_options("solo", 1, 0.0, "average", 4, nonfinite=nonfinite)


@pytest.mark.parametrize("passes", [0, -1, 1.0, "2", None, True])
def test_wrong_passes(passes):
    with pytest.raises(ValueError, match=r"is not a number of backward passes: take 1 or more"):
        check_passes(passes)
    check_passes(3)


AVERAGE, SUM, ADASUM = 0, 1, 2


def test_scales():
    assert scales(AVERAGE, AVERAGE, SUM, 1.0, 4) == (1.0, 0.25)
    assert scales(AVERAGE, AVERAGE, SUM, 8.0, 4) == (0.125, 2.0)
    assert scales(SUM, AVERAGE, SUM, 1.0, 4) == (1.0, 1.0)


@pytest.mark.parametrize("op", [ADASUM, None, "average"])
def test_wrong_op(op):
    with pytest.raises(ValueError, match=r"op=.* does not go with partial allreduce.*take hvd\.Average or hvd\.Sum"):
        scales(op, AVERAGE, SUM, 1.0, 4)


@pytest.mark.parametrize("predivide", [0, -1.0, float("inf"), float("nan"), "2", None, True])
def test_wrong_predivide(predivide):
    with pytest.raises(ValueError, match=r"gradient_predivide_factor=.* is not a factor: take a number above 0"):
        scales(AVERAGE, AVERAGE, SUM, predivide, 4)


def test_predivide_does_not_go_with_sum():
    with pytest.raises(ValueError, match="leave it out with Sum"):
        scales(SUM, AVERAGE, SUM, 2.0, 4)
