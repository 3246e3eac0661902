"""Whole algorithms on real engines and a real coordinator, ranks being threads of one process."""
