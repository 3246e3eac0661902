"""The runtime of all algorithms: threads, sockets, messages and the life of a process. It depends on no algorithm."""
