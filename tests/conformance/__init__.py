"""Both bindings against one float64 NumPy reference, and each binding's promises to its users."""
