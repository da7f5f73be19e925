# SPDX-License-Identifier: Apache-2.0
"""The exceptions that fullshard raises.

    FullshardError
    ├── ConfigurationError (ValueError)      the caller asked for something that cannot be
    ├── UsageError (RuntimeError)            right thing, wrong moment: order of calls, lost state
    ├── UnshardedOperationError (RuntimeError)  an operation that needs the full parameter
    ├── CommunicationError (RuntimeError)    other ranks died, hang, or do something else
    ├── CheckpointError (RuntimeError)       a checkpoint is damaged, incomplete or not there
    ├── TorchVersionError (ImportError)      this torch lacks something that the engine needs
    └── NotSupportedError (NotImplementedError)   a gap, named

Each is also the built-in class that a reader would have caught, so ``except ValueError`` works.
"""

from pathlib import Path


class FullshardError(Exception):
    """Base of all errors raised by fullshard."""


class ConfigurationError(FullshardError, ValueError):
    """The caller's arguments cannot be satisfied; nothing was changed."""


class UsageError(FullshardError, RuntimeError):
    """A call came in the wrong order, or on state that is no longer valid."""


class UnshardedOperationError(FullshardError, RuntimeError):
    """An operation needs a whole parameter, but this rank holds one span of it.

    No `TypeError`: torch's operators (``p + v``) would swallow that and its message.
    """


class CommunicationError(FullshardError, RuntimeError):
    """A collective failed, or the ranks disagree on it; the message says what each rank is doing.

    The group cannot be used any further, and units may be left half gathered.
    """


class CheckpointError(FullshardError, RuntimeError):
    """A checkpoint cannot be written, found or trusted; the message says where and what to do.

    ``file`` is the path at fault, ``tensor`` the name of the tensor, and ``byte_range`` the bytes
    of the file, (start, stop); each is None where it has no meaning.
    """

    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        tensor: str | None = None,
        byte_range: tuple[int, int] | None = None,
    ):
        super().__init__(message)
        self.file = file
        self.tensor = tensor
        self.byte_range = byte_range


class TorchVersionError(FullshardError, ImportError):
    """This version of torch lacks names that the engine needs; nothing was imported."""


class NotSupportedError(FullshardError, NotImplementedError):
    """Known and wanted, but not built yet; the message names the argument."""


def check_whole(name: str, value: object, least: int = 1) -> None:
    """Raise `ConfigurationError` unless ``value`` is a whole number of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigurationError(
            f"{name} must be a whole number of at least {least}, got {value!r}"
        )


def check_new(name: str, path: Path) -> None:
    """Raise `ConfigurationError` if a file, a link or a folder that is not empty is at ``path``."""
    if path.is_dir() and not path.is_symlink() and not any(path.iterdir()):
        return
    if path.is_symlink() or path.is_file() or path.is_dir():
        raise ConfigurationError(
            f"{name} must be new, but {path} is there: remove it, or name another"
        )
