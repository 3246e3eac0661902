"""Advice from the trace of a run: its stragglers, and by simulation the speed of each mode."""
