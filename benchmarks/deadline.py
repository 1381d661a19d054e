"""Time that a part of a script may take, and commands that end with it."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class OutOfTime(Exception):
    """A part's time is over before it is done."""


class Deadline:
    """So many seconds from now on."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self._end = seconds, time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return self._end - time.monotonic()

    def part(self, share: float) -> Deadline:
        """For a part of what is left; share of it, at most 1."""
        return Deadline(max(self.left_s, 0) * min(share, 1))


def run_within(seconds: float, command: Sequence[str | Path], **options: Any) -> int:
    """The exit status of a command. Raises OutOfTime, and ends it with all that it started, where it takes longer."""
    process = subprocess.Popen(command, start_new_session=True, **options)
    try:
        return process.wait(None if math.isinf(seconds) else max(seconds, 0))
    except subprocess.TimeoutExpired:
        raise OutOfTime(f"{command[0]} took more than {seconds:.0f} s") from None
    finally:
        if process.poll() is None:                             # out of time, or Ctrl-C
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
