"""Whole training jobs, simulated: the production state machines, simulated ranks around them, a clock without sleep."""
