import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_async.runner.lr_schedule import Schedule


def test_warm_up_rises_linearly_from_a_tenth():
    schedule = Schedule(2.0, epochs=10, warmup=4)
    assert [schedule.rate(epoch) for epoch in (0, 1, 2, 4, 9.9)] == pytest.approx([0.2, 0.65, 1.1, 2.0, 2.0])


def test_step_decay_at_the_marks():
    schedule = Schedule(1.0, epochs=90, decay_epochs=(30, 60))
    assert [schedule.rate(epoch) for epoch in (0, 29.99, 30, 60, 89)] == pytest.approx([1, 1, 0.1, 0.01, 0.01])


def test_cosine_falls_to_zero_after_the_warm_up():
    schedule = Schedule(1.0, epochs=10, warmup=2, cosine=True)
    values = [schedule.rate(epoch) for epoch in (2, 4, 6, 10, 12)]
    assert values == pytest.approx([1, 0.5 + 0.5 * math.sqrt(0.5), 0.5, 0, 0], abs=1e-12)


@given(
    base=st.floats(1e-6, 10),
    epochs=st.integers(1, 200),
    share=st.floats(0, 0.99),
    cosine=st.booleans(),
    at=st.floats(0, 2),
)
def test_the_rate_stays_between_zero_and_the_base(base, epochs, share, cosine, at):
    rate = Schedule(base, epochs, warmup=share * epochs, cosine=cosine).rate(at * epochs)
    assert 0 <= rate <= base * (1 + 1e-12)


def test_what_does_not_go_together():
    with pytest.raises(ValueError, match="lower --warmup-epochs or raise --epochs"):
        Schedule(1.0, epochs=5, warmup=5)
    with pytest.raises(ValueError, match="not both"):
        Schedule(1.0, epochs=5, cosine=True, decay_epochs=(3,))
