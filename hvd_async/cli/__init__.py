"""Command line ``hvd_async COMMAND``: a module per command."""
