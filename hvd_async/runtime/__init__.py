"""Runs any algorithm and knows none: threads, sockets, messages, the life of a process."""
