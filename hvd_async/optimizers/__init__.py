"""The framework-neutral half of a wrapped optimizer: options, drains, checkpoints, what a step asks of its worker."""
