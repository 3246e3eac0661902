"""Who tells the coordinator that an exchange has landed: to whom it goes, since a sender's part may end at once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hvd_async.algorithms.gossip.config import (
    ExchangeDone,
    MessageComing,
    MessageQueued,
    NoMessage,
    StartExchange,
    senders_of,
)
from hvd_async.algorithms.gossip.message_format import HEADER, OutgoingMessage
from hvd_async.algorithms.gossip.rank import MessageExchange

RANKS = 4
NOBODY = (-1,) * RANKS


def exchanges(own, sent, senders=()):
    """Exchanges on a rank, which complete when they are submitted: these ranks' messages come then."""
    result = [HEADER.pack(1, 1.0) for _ in senders], [senders.count(place) for place in range(RANKS)]
    engine = SimpleNamespace(rank=own, size=RANKS, send=sent.append, submit=lambda _, landed: landed(result))
    post = SimpleNamespace(pack=list, unpack=lambda row: (b"x", row), nbytes=1, members=(), process_set=None)
    return MessageExchange(engine, post, lambda *_: None, lambda _: [], lambda: None)


def told(own, exchange, receivers):
    """What a rank tells in an exchange in which ``receivers[rank]`` gets that rank's message (-1: nobody)."""
    sent = []
    senders = [rank for rank, _ in exchange.messages if receivers[rank] == own]
    senders += [b if a == own else a for a, b in exchange.pairs if own in (a, b)]
    mail = exchanges(own, sent, senders)
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
    assert telling(StartExchange(7, 1, senders_of([(rank, 1) for rank in range(RANKS)]), []), receivers) == [tells]


def test_also_where_some_ranks_only_send():
    assert telling(StartExchange(7, 1, senders_of([(2, 1), (0, 1)]), []), (1, -1, 3, -1)) == [3]


def test_of_pairs_the_partner_of_the_first():
    assert telling(StartExchange(7, 1, [], [(3, 1), (0, 2)])) == [1]


# -- announced before they are queued -------------------------------------------------------------------------------

ALL = StartExchange(7, 1, senders_of([(rank, 2) for rank in range(RANKS)]), [])


def test_an_exchange_waits_for_messages_that_were_announced():
    mail = exchanges(0, sent := [], [3])
    mail.announce(7, 2)
    mail.exchange(ALL)
    assert (sent, mail.completed) == ([MessageComing(7, 2)], 0)
    mail.offer(7, 2, [OutgoingMessage(1, b"x")], 1.0)
    assert (sent, mail.completed, mail.own_sent) == ([MessageComing(7, 2)], 1, 1)


def test_messages_are_queued_where_the_exchange_is_not_known_yet():
    mail = exchanges(0, sent := [], [3])
    mail.announce(7, 2)
    mail.offer(7, 2, [OutgoingMessage(1, b"x")], 1.0)
    assert sent == [MessageComing(7, 2), MessageQueued(7, 2)]
    mail.exchange(ALL)
    assert (mail.completed, mail.own_sent) == (1, 1)


@pytest.mark.parametrize("known", [False, True])
def test_a_rank_without_receivers_after_all_takes_part_and_says_itself_that_the_exchange_is_over(known):
    mail = exchanges(0, sent := [], [3])
    mail.announce(7, 2)
    if known:
        mail.exchange(ALL)
    mail.offer(7, 2, [], 1.0)
    if not known:
        assert sent.pop() == NoMessage(7, 2)
        mail.exchange(ALL)
    assert sent == [MessageComing(7, 2), ExchangeDone(7, 1)]
    assert (mail.completed, mail.own_sent) == (1, 0)
