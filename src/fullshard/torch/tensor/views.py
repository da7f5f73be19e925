# SPDX-License-Identifier: Apache-2.0
"""The views of sharded tensors that somebody still holds.

[Note: Views that are held]
A view (``detach()``, ``.data``, rows, another shape) shares the memory of what it was made of. What
happens to that without a write to its memory would pass views by: a step that is put off, and an
assignment of ``.data``, which gives a plain tensor other memory and leaves its views the old one.
So the tensors that share memory know each other, weakly: all of them have one dictionary. What is
behind a plain tensor, as ``.local`` or ``to_local()``, cannot be known.
"""

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

_VIEWS = "_fullshard_views"


def note_view(made: Any, viewed: Any) -> None:
    """Note that ``made`` is a view of ``viewed``."""
    views = viewed.__dict__.get(_VIEWS)
    if views is None:
        views = viewed.__dict__[_VIEWS] = WeakValueDictionary()
    views[id(made)] = made
    made.__dict__[_VIEWS] = views


def views_of(tensor: Any) -> list[Any]:
    """Return what is held of ``tensor`` and its views, without itself."""
    known = tensor.__dict__.get(_VIEWS)
    if not known:
        return []
    held = (reference() for reference in known.valuerefs())  # threads may make others meanwhile
    return [each for each in held if each is not None and each is not tensor]


def leave_to_views(tensor: Any) -> None:
    """Give the views of ``tensor`` memory of their own with its values, which they share."""
    own = tensor.local
    views = [view for view in views_of(tensor) if _lies_in(view.local, own)]
    if not views:
        return
    with torch.inference_mode(False):
        kept = own.clone().untyped_storage()
        for view in views:
            local = view.local
            offset = (local.data_ptr() - own.data_ptr()) // local.element_size()
            view.local = local.new_empty(0).set_(kept, offset, local.shape, local.stride())


def _lies_in(part: Tensor, whole: Tensor) -> bool:
    begin = part.data_ptr() - whole.data_ptr()
    return begin >= 0 and 0 < part.nbytes <= whole.nbytes - begin
