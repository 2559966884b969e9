"""Keep a folder for one job: by a lock that the system frees when the process that holds it ends, however it ends.

It is flock on the file `lock` in the folder. Linux and macOS have it on local disks, Linux on NFS, too, where the
file server frees the lock of a machine that has died after its lease, some 90 seconds. On a file system without it
there is a warning.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import threading
import time
import warnings
import weakref
from pathlib import Path

from sbpc.errors import CheckpointError

WITHOUT = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # what a file system says that has no flock


class FolderLock:
    """A lock on a folder, held as long as this object lives. writing: the steps that are being written there now."""

    def __init__(self, folder: Path) -> None:
        self.path, self.writing = folder / "lock", set[int]()
        self.file = self.path.open("a+")
        weakref.finalize(self, self.file.close)
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.file.seek(0)
            raise CheckpointError(
                f"{folder} belongs to another job: {self.file.read(200).strip() or 'one that has just begun'} saves "
                "there\n"
                "  Give each job a folder of its own, or end that process."
            ) from error
        except OSError as error:
            if error.errno not in WITHOUT:
                raise
            warnings.warn(
                f"{folder} cannot be kept for this job: {error}\n  Let no other job save there.", stacklevel=2
            )
        # else a forked child, such as of a DataLoader, holds it as long as it lives
        os.register_at_fork(after_in_child=self.file.close)
        self.file.truncate(0)
        self.file.write(
            f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S %z')},"
        )
        self.file.flush()

    def holds(self) -> bool:
        """Returns whether this is a lock of the file that is there now: a folder may have been removed and made
        anew."""
        try:
            return not self.file.closed and os.path.samestat(os.fstat(self.file.fileno()), self.path.stat())
        except OSError:
            return False


# The state of this process, as a lock is the process's: all Checkpoints of a folder in it share one.
locks: weakref.WeakValueDictionary[Path, FolderLock] = weakref.WeakValueDictionary()
guard = threading.Lock()


def locked(folder: Path) -> FolderLock:
    """Returns the lock of this process on a folder. Raises CheckpointError if another process has it."""
    place = folder.resolve()
    with guard:
        lock = locks.get(place)
        if lock is None or not lock.holds():
            lock = locks[place] = FolderLock(place)
        return lock
