# SPDX-License-Identifier: Apache-2.0
"""Trials of optimizers that are made once for many, which are tried alike.

Every optimizer over owned matrices is tried before its first step: [Note: A trial] in
`fullshard/torch/state/apart.py`. That takes longer than the few steps of a test.
"""

import contextlib
import functools
import re

import pytest

from fullshard.torch.state import apart

_LEFT_OUT = re.compile("^_fullshard|_hooks$|^(param_groups|state)$")  # as trials do
_ANSWERS = {}


@contextlib.contextmanager
def tried_once():
    """Within, optimizers of one class with the same options are tried once in this process."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_try", "_try_stack"):
            patch.setattr(apart, name, functools.partial(_answer, name, getattr(apart, name)))
        yield


def _answer(name, trial, optimizer):
    own = {name: each for name, each in vars(optimizer).items() if not _LEFT_OUT.search(name)}
    devices = {p.device for group in optimizer.param_groups for p in group["params"]}
    key = name, type(optimizer), repr((apart._chosen(optimizer), own, devices))
    if key not in _ANSWERS:
        _ANSWERS[key] = trial(optimizer)
    return _ANSWERS[key]
