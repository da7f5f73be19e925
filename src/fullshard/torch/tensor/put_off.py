# SPDX-License-Identifier: Apache-2.0
"""Changes of sharded tensors that are made when somebody looks at one of them.

[Note: Put off]
Whatever touches a sharded tensor (an operation, a state dict, a user) takes its ``local``. So a
change can wait: the tensors that it reads or writes lose that attribute, and who asks for it has
the change made first. As long as nothing is put off, ``local`` is found where it always was.
"""

from collections.abc import Callable, Iterable
from itertools import chain
from threading import RLock
from typing import Any

from torch import Tensor

from fullshard.torch.tensor.views import views_of

_PUT_OFF = "_fullshard_put_off"


class PutOff:
    """A ``change`` of ``tensors`` that is made by `catch_up`, or when one of them is looked at.

    ``tensors`` are all sharded tensors that it reads or writes; views of them are found.
    """

    def __init__(self, tensors: Iterable[Any], change: Callable[[], None]):
        self._change: Callable[[], None] | None = change
        self._lock = RLock()
        every = chain.from_iterable((each, *views_of(each)) for each in tensors)
        # Earlier changes of them are made here.
        self._held: list[tuple[Any, Tensor]] = [(each, each.local) for each in every]
        for tensor, _ in self._held:
            tensor.__dict__.pop("local", None)
            tensor.__dict__[_PUT_OFF] = self

    @property
    def waits(self) -> bool:
        """True until the change is made."""
        return self._change is not None

    def catch_up(self) -> None:
        """Make the change, unless it has been made. Until it is over nobody else sees the tensors.

        One that raises is over. One that is interrupted is not: who looks next goes on with it.
        """
        with self._lock:
            if self._change is None:
                return
            try:
                self._change()
            except Exception:
                self._show()
                raise
            self._show()

    def _show(self) -> None:
        for tensor, local in self._held:
            tensor.__dict__["local"] = local
            tensor.__dict__.pop(_PUT_OFF, None)
        self._held.clear()
        self._change = None


class Local:
    """Stands in a class of sharded tensors for the ``local`` of those whose change is put off."""

    def __get__(self, tensor: Any, kind: type) -> Any:
        if tensor is None:
            return self
        put_off: PutOff | None = tensor.__dict__.get(_PUT_OFF)
        if put_off is None:
            raise AttributeError(f"{kind.__name__} has no local memory")
        put_off.catch_up()
        return tensor.__dict__["local"]
