# SPDX-License-Identifier: Apache-2.0
"""The store through which ranks tell each other where they are: a connection of its own to it."""

import socket
from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d as c10d

STORE_TIMEOUT = timedelta(seconds=5)
_NEVER_SET = "fullshard sets no such key"


def own_store() -> Any | None:
    """Return a further connection to the default group's store; None if it keeps nothing.

    A connection that waits for a key serves nobody else. The store of fake groups cannot be cloned
    in torch 2.13 and earlier; later it has every key, and nothing under any.
    """
    try:
        default: Any = c10d._get_default_store()
        store = default.clone()
        store.set_timeout(STORE_TIMEOUT)
        return None if store.check([_NEVER_SET]) else store
    except (RuntimeError, ValueError, AttributeError):
        return None


def connect_to_server_of(store: Any, timeout_s: float) -> socket.socket | None:
    """Return a connection to a TCP store's server; None for another store, or where it fails."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if not hasattr(store, "port"):
        return None
    try:
        connection = socket.create_connection((store.host, store.port), timeout_s)
    except OSError:
        return None
    connection.setblocking(False)
    return connection
