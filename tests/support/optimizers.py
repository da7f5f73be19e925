# SPDX-License-Identifier: Apache-2.0
"""Optimizers of torch, with options that reach most of their branches."""

from functools import partial

from torch import optim

OPTIMIZERS = {
    "sgd": partial(optim.SGD, lr=0.1, weight_decay=0.1),
    "sgd-momentum": partial(optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "sgd-nesterov": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": partial(optim.Adam, lr=0.1, weight_decay=0.1),
    "adam-amsgrad": partial(optim.Adam, lr=0.1, weight_decay=0.1, amsgrad=True, maximize=True),
    "adamw": partial(optim.AdamW, lr=0.1),
    "adagrad": partial(optim.Adagrad, lr=0.1, lr_decay=0.1),
    "adadelta": partial(optim.Adadelta, lr=0.1),
    "rmsprop": partial(optim.RMSprop, lr=0.01, centered=True, momentum=0.9),
    "adamax": partial(optim.Adamax, lr=0.1),
    "nadam": partial(optim.NAdam, lr=0.1),
    "radam": partial(optim.RAdam, lr=0.1),
    "asgd": partial(optim.ASGD, lr=0.1, t0=1, lambd=0.01),
    "rprop": partial(optim.Rprop, lr=0.01),
}
FUSED = {"sgd", "sgd-momentum", "sgd-nesterov", "adam", "adam-amsgrad", "adamw", "adagrad"}
FORMS = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
CASES = [(name, form) for name in OPTIMIZERS for form in FORMS if form != "fused" or name in FUSED]
