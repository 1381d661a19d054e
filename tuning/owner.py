"""Which process runs a trial: enough of its identity to tell later whether it still lives."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def myself() -> dict[str, Any]:
    """This process. A pid alone is reused; with the start time and the boot it is not."""
    return {"host": socket.gethostname(), "boot": _boot(), "pid": os.getpid(), "start": _start(os.getpid())}


def lives(owner: Mapping[str, Any]) -> bool | None:
    """Whether the process that `owner` describes still runs; None where that cannot be known from here (another host)."""
    if owner.get("host") != socket.gethostname():
        return None
    if owner.get("boot") != _boot():
        return False
    pid = owner.get("pid")
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass                       # it exists, under another user
    return owner.get("start") == _start(pid)


def _boot() -> str:
    return _read("/proc/sys/kernel/random/boot_id").strip()


def _start(pid: int) -> str:
    """Start time of a process in clock ticks since boot; "" where /proc is absent, "dead" for a zombie, which runs nothing."""
    stat = _read(f"/proc/{pid}/stat")
    if not stat:
        return ""
    state, *rest = stat[stat.rindex(")") + 2:].split()   # the name before it may hold spaces and parentheses
    return "dead" if state in "ZX" else rest[18]


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
