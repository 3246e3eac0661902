"""The command line, ``hvd_async COMMAND``: a module for each command."""
