"""The life of a process's engine, with everything it touches stood in for."""

from __future__ import annotations

import threading

from hvd_async.runtime.lifecycle import Lifecycle, local_engine, use_engine


def test_the_engine_of_a_thread_is_its_own():
    mine, other = object(), []
    with use_engine(mine):  # type: ignore[arg-type]
        assert local_engine() is mine
        thread = threading.Thread(target=lambda: other.append(local_engine()))
        thread.start()
        thread.join(10)
        assert Lifecycle(lambda: None, (), lambda: None).engine() is mine  # type: ignore[arg-type, return-value]
    assert other == [None]
    assert local_engine() is None


def test_join_registers_all_in_the_order_of_wrapping_and_drains_once():
    """One drain is for all of a process's optimizers; registered are all, before it waits."""

    class Driver:
        def __init__(self, number: int) -> None:
            self.number, self.discarded = number, number == discarded

        def register(self) -> None:
            done.append(("registered", self.number))

        def drain_all(self) -> int:
            done.append(("drained", self.number))
            return 3

    class Optimizer:
        def __init__(self, number: int) -> None:
            self._async = Driver(number)

    discarded = 2
    done: list[tuple[str, int]] = []
    lifecycle = Lifecycle(lambda: None, (), lambda: None)  # type: ignore[arg-type, return-value]
    assert lifecycle.join() is None
    kept = [Optimizer(number) for number in range(4)]
    for optimizer in kept:
        lifecycle.add(optimizer)
    del kept[1], optimizer
    lifecycle.add(last := Optimizer(9))
    assert lifecycle.join() == 3
    assert done == [*(("registered", number) for number in (0, 3, 9)), ("drained", last._async.number)]


def test_shutdown_and_abandon_without_an_engine_do_nothing():
    lifecycle = Lifecycle(lambda: None, (), lambda: None)  # type: ignore[arg-type, return-value]
    lifecycle.shutdown()
    lifecycle.abandon("boom")
