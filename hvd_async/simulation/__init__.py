"""Simulation of training jobs: production state machines and workers, a simulated network and a simulated clock."""
