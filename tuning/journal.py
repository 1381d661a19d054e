"""A study file: an Optuna journal that survives killed writers, races and torn records."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from optuna.exceptions import DuplicatedStudyError, UpdateFinishedTrialError
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from sparselift.errors import SparseLiftError

logger = logging.getLogger("sparselift.tuning")

_RECORD_START = b'{"op_code":'
_TORN_SUFFIX = ".torn"


class StudyFile(JournalStorage):
    """An Optuna storage over one file, for any number of processes on one machine at once."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._file_lock = _FileLock(path)
        self._claims = threading.RLock()
        with self.exclusive():
            _recover(path)
        super().__init__(JournalFileBackend(path, cast(Any, self._file_lock)))

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """No other process appends a record meanwhile, and no other thread enters here."""
        with self._claims:
            self._file_lock.acquire()
            try:
                yield
            finally:
                self._file_lock.release()

    def _sync_with_backend(self) -> None:
        # Every reader comes through here. Optuna's own two errors say that another process was faster.
        try:
            with damage_named(f"study file {self.path}"):
                super()._sync_with_backend()
        except (DuplicatedStudyError, UpdateFinishedTrialError):
            raise
        except SparseLiftError as error:
            raise SparseLiftError(f"{error} (line {self._replay_result.log_number_read})") from error.__cause__

    def __getstate__(self) -> dict[Any, Any]:
        raise TypeError(f"a study file is opened by each process for itself: open_storage({self.path!r})")


def open_storage(path: str | os.PathLike[str], create: bool = True) -> StudyFile:
    """Open the study file at `path`, and create it if it does not exist.

    Any number of processes may do so at once. A file that was cut, or whose last record is torn, keeps every whole record
    before the first torn one; the rest moves to `<path>.torn` with a warning.

    Raises
    ------
    SparseLiftError   the file is not an Optuna journal (it is left as it is), cannot be read or written, or does not exist
                      and `create` is false
    """
    path = os.fspath(path)
    if not create and not Path(path).exists():
        raise SparseLiftError(f"study file {path} does not exist")
    try:
        return StudyFile(path)
    except OSError as error:
        raise SparseLiftError(f"study file {path} cannot be opened: {error.strerror or error}") from error


@contextmanager
def damage_named(place: str) -> Iterator[None]:
    """What a damaged record makes its reader raise, whatever it is, becomes a SparseLiftError that names the place."""
    try:
        yield
    except (SparseLiftError, OSError, DuplicatedStudyError, UpdateFinishedTrialError):
        raise
    except Exception as error:
        raise SparseLiftError(f"{place} is damaged: {type(error).__name__}: {error}") from error


class _FileLock:
    """Exclusive use of the study file by one process: an flock on the file itself.

    It ends with its process, so that a killed writer blocks nobody (Optuna's own locks wait 30 s for one), and it needs no second
    file. Threads of the process hold it together, since Optuna orders their records by a lock of its own. A record that a killed
    writer left torn is cut off before anything is appended to it.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._mutex = threading.Lock()
        self._holders = 0
        self._descriptor = -1

    def acquire(self) -> bool:
        with self._mutex:
            if self._holders == 0:
                self._descriptor = _locked_descriptor(self._path)
            self._holders += 1
        return True

    def release(self) -> None:
        with self._mutex:
            self._holders -= 1
            if self._holders == 0:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)   # closing would leave it to a child that was forked meanwhile
                os.close(self._descriptor)


def _locked_descriptor(path: str) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            _recover(path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _recover(path: str) -> None:
    """Cut the file before its first torn record. Needs the lock. Raises SparseLiftError for a file that is no journal."""
    with open(path, "rb") as file:
        good_bytes = 0
        records = 0
        for line in file:
            if not _is_record(line):
                break
            good_bytes += len(line)
            records += 1
        else:
            return
        file.seek(good_bytes)
        torn = file.read()
    if records == 0 and not (torn.startswith(_RECORD_START) or _RECORD_START.startswith(torn)):
        raise SparseLiftError(f"{path} is not a study file: it starts with {torn[:24]!r}, not with a record of an Optuna journal")
    with open(path + _TORN_SUFFIX, "ab") as aside:
        aside.write(torn)
        aside.flush()
        os.fsync(aside.fileno())
    os.truncate(path, good_bytes)
    logger.warning("study file %s was torn after %d whole records; they are kept, and the other %d bytes moved to %s%s",
                   path, records, len(torn), path, _TORN_SUFFIX)


def _is_record(line: bytes) -> bool:
    if not line.endswith(b"\n"):
        return False
    try:
        record = json.loads(line)
    except ValueError:
        return False
    return isinstance(record, dict) and isinstance(record.get("op_code"), int) and "worker_id" in record
