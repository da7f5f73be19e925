# SPDX-License-Identifier: Apache-2.0
"""The one place through which a checkpoint touches the file system.

Every operation is a method of `Files`, so that a test can let any of them fail, be slow, or be the
last thing that a process does.
"""

import errno
import fcntl
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

DIRECT = getattr(os, "O_DIRECT", 0)  # on Linux
ALIGNMENT = 4096  # of memory and places that O_DIRECT takes, on all usual media


@dataclass(frozen=True)
class OpenFile:
    """A file that is open, by its descriptor; the path is for people."""

    path: Path
    descriptor: int


class Files:
    """The file system of this machine. All methods raise `OSError`."""

    def make_folder(self, path: Path) -> None:
        """Make a folder and those above it; fine if it is there."""
        os.makedirs(path, exist_ok=True)

    def make_new_folder(self, path: Path) -> None:
        """Make one folder, which must not be there."""
        os.mkdir(path)

    def create(self, path: Path, direct: bool = False) -> OpenFile:
        """Open a new file for writing; ``direct``: past the page cache, where that is possible."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        file = OpenFile(path, os.open(path, flags, 0o666))
        if direct:
            _set_direct(file, True)
        return file

    def write(self, file: OpenFile, data: memoryview) -> None:
        """Append all bytes. For a file opened ``direct``, ``data`` begins on an aligned address.

        The first write whose length is not aligned must be the last but for such ones.
        """
        if data.nbytes % ALIGNMENT:
            whole = data.nbytes - data.nbytes % ALIGNMENT
            if whole:
                self._write_all(file, data[:whole])
            _set_direct(file, False)
            data = data[whole:]
        self._write_all(file, data)

    def _write_all(self, file: OpenFile, data: memoryview) -> None:
        while data.nbytes:
            try:
                data = data[os.write(file.descriptor, data) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not _set_direct(file, False):
                    raise

    def flush(self, file: OpenFile) -> None:
        """Wait until what was written is on the medium."""
        os.fsync(file.descriptor)

    def flush_folder(self, path: Path) -> None:
        """Wait until the names in a folder are on the medium."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def close(self, file: OpenFile) -> None:
        """Close a file."""
        os.close(file.descriptor)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file or folder another name, at once; ``new`` must not be there."""
        if new.exists():  # an empty folder would be replaced silently
            raise FileExistsError(17, "File exists", str(new))
        os.rename(old, new)

    def replace(self, old: Path, new: Path) -> None:
        """Give a file the name of another one, which is gone then."""
        os.replace(old, new)

    def open_folder(self, path: Path, inside: OpenFile | None = None) -> OpenFile:
        """Open a folder; ``path`` is a name ``inside`` of one that is open, and then no link."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        if inside is None:
            return OpenFile(path, os.open(path, flags))
        descriptor = os.open(path, flags | os.O_NOFOLLOW, dir_fd=inside.descriptor)
        return OpenFile(inside.path / path, descriptor)

    def look(self, folder: OpenFile, name: str) -> os.stat_result:
        """Tell what ``name`` in an open folder is; a link is one."""
        return os.stat(name, dir_fd=folder.descriptor, follow_symlinks=False)

    def rename_inside(self, folder: OpenFile, old: str, new: str) -> None:
        """Give what is in an open folder another name in it."""
        os.rename(old, new, src_dir_fd=folder.descriptor, dst_dir_fd=folder.descriptor)

    def remove(self, folder: OpenFile, name: str) -> None:
        """Remove a file or link from an open folder."""
        os.unlink(name, dir_fd=folder.descriptor)

    def remove_folder(self, folder: OpenFile, name: str) -> None:
        """Remove an empty folder from an open one."""
        os.rmdir(name, dir_fd=folder.descriptor)

    def names(self, folder: Path | OpenFile) -> list[str]:
        """List a folder, sorted."""
        return sorted(os.listdir(folder.descriptor if isinstance(folder, OpenFile) else folder))

    def lock(self, path: Path, text: str) -> OpenFile:
        """Lock a file until it is closed or the process ends, and write ``text`` into it.

        Raises `BlockingIOError` if another process has it. Where the file system has no locks it is
        only written.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        file = OpenFile(path, os.open(path, flags, 0o666))
        try:
            try:
                fcntl.lockf(file.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    raise BlockingIOError(error.errno, "it is locked", str(path)) from error
                if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                    raise
            os.ftruncate(file.descriptor, 0)
            os.pwrite(file.descriptor, text.encode(), 0)
        except BaseException:
            os.close(file.descriptor)
            raise
        return file

    def open(self, path: Path) -> OpenFile:
        """Open a file for reading; a symbolic link in its place is refused."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        file = OpenFile(path, os.open(path, flags))
        if hasattr(os, "posix_fadvise"):
            # Threads read chunk after chunk, not quite in order; only an advice, refused by pipes.
            with suppress(OSError):
                os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return file

    def size(self, file: OpenFile) -> int:
        """Bytes of an open file."""
        return os.fstat(file.descriptor).st_size

    def read_into(self, file: OpenFile, view: memoryview, start: int) -> int:
        """Fill ``view`` with the bytes from ``start``; fewer only where the file ends."""
        filled = 0
        while filled < view.nbytes:
            count = os.preadv(file.descriptor, [view[filled:]], start + filled)
            if not count:
                break
            filled += count
        return filled


def read_whole(files: Files, path: Path, most_bytes: int = 2**62) -> bytes:
    """Return the bytes of a file. Raises `OSError`, also if there are more than ``most_bytes``."""
    file = files.open(path)
    try:
        size = files.size(file)
        if size > most_bytes:
            raise OSError(errno.EFBIG, f"it has {size} bytes, expected at most {most_bytes}")
        data = bytearray(size)
        return bytes(data[: files.read_into(file, memoryview(data), 0)])
    finally:
        files.close(file)


def write_new(files: Files, path: Path, data: bytes, flush: bool = False) -> None:
    """Make a file with these bytes, which must not be there. Raises `OSError`."""
    file = files.create(path)
    try:
        files.write(file, memoryview(data))
        if flush:
            files.flush(file)
    finally:
        files.close(file)


def _set_direct(file: OpenFile, wanted: bool) -> bool:
    """Switch O_DIRECT; True if it has changed."""
    flags = fcntl.fcntl(file.descriptor, fcntl.F_GETFL)
    changed = (flags | DIRECT) if wanted else (flags & ~DIRECT)
    if changed == flags:
        return False
    try:
        fcntl.fcntl(file.descriptor, fcntl.F_SETFL, changed)
    except OSError:
        if not wanted:
            raise
        return False
    return True
