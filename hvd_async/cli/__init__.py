"""Command line ``hvd_async COMMAND``."""
