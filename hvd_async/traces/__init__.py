"""Trace of a run: when each rank computed and when it waited, step by step; a file per rank."""
