"""Gossip: ranks have weights of their own and average them with a few neighbours."""
