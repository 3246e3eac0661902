"""Partial allreduce: gradients are averaged in rounds that start when enough ranks are ready."""
