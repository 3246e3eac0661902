"""Blocks of memory that serve one step after the other: when one is free, and how it lies."""

import gc
import threading

import numpy as np
import pytest

from hvd_async.runtime.memory import ALIGNMENT, ReusedBlocks


def free(blocks: ReusedBlocks) -> int:
    return sum(map(len, blocks._free.values()))


def test_a_block_serves_again_when_the_last_view_of_it_is_gone():
    blocks = ReusedBlocks(most=8)
    first = blocks.take(400)
    where, view = first.ctypes.data, first[40:].view(np.float32)[10:20].reshape(2, 5)
    del first
    assert free(blocks) == 0
    view[:] = 7.0
    other = blocks.take(400)
    other[:] = 0
    assert view.tolist() == [[7.0] * 5] * 2
    del view
    gc.collect()
    assert free(blocks) == 1
    assert blocks.take(404).ctypes.data != where  # another length
    assert blocks.take(400).ctypes.data == where


@pytest.mark.parametrize("nbytes", [1, 63, 64, 1000, 5_000_000])
def test_blocks_are_aligned_as_kernels_want_them_and_of_their_length(nbytes):
    blocks = ReusedBlocks(most=4)
    held = [blocks.take(nbytes) for _ in range(3)]
    assert [one.ctypes.data % ALIGNMENT for one in held] == [0] * 3
    assert [one.nbytes for one in held] == [nbytes] * 3
    for number, one in enumerate(held):
        one[:] = number
    assert [set(one.tolist()) for one in held] == [{0}, {1}, {2}]


def test_no_more_are_kept_than_said_none_of_nothing_and_none_after_clearing():
    blocks = ReusedBlocks(most=2)
    assert blocks.take(0).nbytes == 0
    assert free(blocks) == 0
    held = [blocks.take(48) for _ in range(5)]
    del held
    assert free(blocks) == 2
    late = blocks.take(48)
    blocks.clear()
    assert free(blocks) == 0
    del late
    assert free(blocks) == 0


def test_blocks_are_let_go_in_one_thread_and_taken_in_another():
    blocks, seen = ReusedBlocks(most=16), []

    def work(own: int) -> None:
        for number in range(200):
            mine = blocks.take(80).view(np.int64)
            mine[:] = 1000 * own + number
            seen.append(bool((mine == 1000 * own + number).all()))

    threads = [threading.Thread(target=work, args=(own,)) for own in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == [True] * 800
    assert free(blocks) <= 8  # as many as were held at once: two a thread
