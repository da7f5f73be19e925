# SPDX-License-Identifier: Apache-2.0
"""Steps of two micro-batches: ``backward(scale)`` runs forward and backward of one."""


def halves_without_communication(model, number, backward):
    model.set_requires_gradient_sync(False)
    backward(0.5)
    model.set_requires_gradient_sync(True)
    backward(0.5)


def halves_each_reduced(model, number, backward):
    backward(0.5)
    backward(0.5)


def halves_overlapping(model, number, backward):
    model.set_is_last_backward(False)
    backward(0.5)
    model.set_is_last_backward(True)
    backward(0.5)
