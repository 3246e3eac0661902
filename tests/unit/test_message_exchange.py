"""Who tells the coordinator that an exchange has landed: to whom it goes, since a sender's part may end at once."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from hvd_async.algorithms.gossip.config import (
    ExchangeDone,
    MessageQueued,
    StartExchange,
    senders_of,
)
from hvd_async.algorithms.gossip.message_format import HEADER, OutgoingMessage
from hvd_async.algorithms.gossip.rank import NO_MESSAGE, Links, MessageExchange
from hvd_async.errors import ReplicaStateError

RANKS = 4
NO_RANK = (-1,) * RANKS


def exchanges(own, sent, senders=(), receivers=(), partner=None, left_out=False):
    """Exchanges on a rank, which complete when they are submitted: these ranks' messages come then.

    ``submitted``: what this rank has sent of each, as (rank, header), and how much it expects of whom.
    """

    def alltoall(packed, splits, coming, *_):
        to = [place for place, count in enumerate(splits) for _ in range(count)]
        submitted.append((list(zip(to, [header for _, header in packed], strict=True)), coming))

    def submit(start, done, **_):
        start()
        done([NO_MESSAGE if left_out else HEADER.pack(1, 1.0) for _ in range(sum(submitted[-1][1]))])

    submitted, delivered = [], []
    engine = SimpleNamespace(
        rank=own,
        size=RANKS,
        send=sent.append,
        submit=submit,
        turn=lambda: None,
        collectives=SimpleNamespace(alltoall=alltoall, in_order=False),
        clock=lambda: 0.0,
        changed=threading.RLock(),
    )
    post = SimpleNamespace(
        pack=list,
        unpack=lambda row: (b"x", row),
        nbytes=1,
        members=(),
        process_set=None,
        room=lambda: None,
        scalar=lambda number: b"",
        as_bytes=lambda data: data,
    )
    snapshots = [] if partner is None else [(1, OutgoingMessage(partner, b"x"))]
    links = Links(receivers, senders)
    mail = MessageExchange(
        engine, post, lambda _: links, lambda *message: delivered.append(message), lambda _: snapshots, lambda: None
    )
    mail.submitted, mail.delivered = submitted, delivered
    return mail


def reported(own, exchange, receivers):
    """What a rank tells in an exchange in which ``receivers[rank]`` gets that rank's message (-1: no rank)."""
    sent = []
    senders = [rank for rank, _ in exchange.messages if receivers[rank] == own]
    partner = next((b if a == own else a for a, b in exchange.pairs if own in (a, b)), None)
    mail = exchanges(own, sent, senders, [receivers[own]] if receivers[own] >= 0 else [], partner)
    if any(rank == own for rank, _ in exchange.messages):
        letters = [OutgoingMessage(receivers[own], b"x")] if receivers[own] >= 0 else []
        mail.offer(7, 1, letters, 1.0)
        assert sent.pop() == MessageQueued(7, 1)
    mail.exchange(exchange)
    return sent


def telling(exchange, receivers=NO_RANK):
    """The ranks that tell; no rank tells anything else."""
    found = {own: reported(own, exchange, receivers) for own in range(RANKS)}
    assert all(events == [ExchangeDone(7, exchange.round)] for events in found.values() if events)
    return [own for own, events in found.items() if events]


@pytest.mark.parametrize(("receivers", "tells"), [((1, 2, 3, 0), 1), ((2, 3, 0, 1), 2), ((3, 0, 1, 2), 3)])
def test_the_receiver_of_the_first_message_tells(receivers, tells):
    assert telling(StartExchange(7, 1, senders_of([(rank, 1) for rank in range(RANKS)]), []), receivers) == [tells]


def test_also_where_some_ranks_only_send():
    assert telling(StartExchange(7, 1, senders_of([(2, 1), (0, 1)]), []), (1, -1, 3, -1)) == [3]


def test_of_pairs_the_partner_of_the_first():
    assert telling(StartExchange(7, 1, [], [(3, 1), (0, 2)])) == [1]


# -- announced before they are queued -------------------------------------------------------------------------------


# -- both ends know what goes, from the command and the plan -----------------------------------------------------------


def test_a_message_that_is_left_out_is_replaced_and_not_delivered():
    mail = exchanges(0, [], [3], [1, 2], left_out=True)
    mail.offer(7, 1, [OutgoingMessage(2, b"x")], 0.5)
    mail.exchange(StartExchange(7, 1, [(0, RANKS - 1, 1)]))
    assert mail.submitted == [([(1, NO_MESSAGE), (2, HEADER.pack(1, 0.5))], [0, 0, 0, 1])]
    assert mail.delivered == []


def test_a_message_that_its_receiver_does_not_expect_is_refused():
    mail = exchanges(0, [], [3], [1])
    mail.offer(7, 1, [OutgoingMessage(2, b"x")], 1.0)
    with pytest.raises(ReplicaStateError, match="to ranks that expect none"):
        mail.exchange(StartExchange(7, 1, [(0, RANKS - 1, 1)]))
