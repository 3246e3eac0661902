"""Pure tests: no threads, no network, no framework."""
