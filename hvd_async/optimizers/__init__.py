"""The framework-neutral half of a wrapped optimizer: options, drains, checkpoints, and calls into its worker."""
