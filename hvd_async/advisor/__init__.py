"""Advice from the trace of a run: its stragglers, and the simulated speed of each mode."""
