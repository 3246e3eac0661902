"""Who tells the coordinator that an exchange has landed: to whom it goes, since a sender's part may end at once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hvd_async.algorithms.gossip.message_exchange import HEADER, MessageExchange, OutgoingMessage
from hvd_async.algorithms.gossip.messages import ExchangeDone, MessageQueued, StartExchange

RANKS = 4
NOBODY = (-1,) * RANKS


def told(own, exchange, receivers):
    """What a rank tells in an exchange in which ``receivers[rank]`` gets that rank's message (-1: nobody)."""
    sent = []
    senders = [rank for rank, _ in exchange.messages if receivers[rank] == own]
    senders += [b if a == own else a for a, b in exchange.pairs if own in (a, b)]
    rows = [HEADER.pack(1, 1.0) for _ in senders]
    result = rows, [senders.count(place) for place in range(RANKS)]
    engine = SimpleNamespace(rank=own, size=RANKS, send=sent.append, submit=lambda _, landed: landed(result))
    post = SimpleNamespace(pack=list, unpack=lambda row: (b"x", row), nbytes=1, members=(), process_set=None)
    mail = MessageExchange(engine, post, lambda *_: None, lambda *_: None, lambda: None)
    if any(rank == own for rank, _ in exchange.messages):
        letters = [OutgoingMessage(receivers[own], b"x")] if receivers[own] >= 0 else []
        mail.offer(7, 1, letters, 1.0)
        assert sent.pop() == MessageQueued(7, 1)
    mail.exchange(exchange)
    return sent


def telling(exchange, receivers=NOBODY):
    """The ranks that tell; no rank tells anything else."""
    found = {own: told(own, exchange, receivers) for own in range(RANKS)}
    assert all(events == [ExchangeDone(7, exchange.round)] for events in found.values() if events)
    return [own for own, events in found.items() if events]


@pytest.mark.parametrize(("receivers", "tells"), [((1, 2, 3, 0), 1), ((2, 3, 0, 1), 2), ((3, 0, 1, 2), 3)])
def test_the_receiver_of_the_first_message_tells(receivers, tells):
    assert telling(StartExchange(7, 1, [(rank, 1) for rank in range(RANKS)], []), receivers) == [tells]


def test_also_where_some_ranks_only_send():
    assert telling(StartExchange(7, 1, [(2, 1), (0, 1)], []), (1, -1, 3, -1)) == [3]


def test_of_pairs_the_partner_of_the_first():
    assert telling(StartExchange(7, 1, [], [(3, 1), (0, 2)])) == [1]
