"""The command line: `sparselift COMMAND ...`."""

from sparselift.cli.main import main

__all__ = ["main"]
