"""Simulated jobs of the benchmarks: what they measured, a published study, and every algorithm at many ranks."""
