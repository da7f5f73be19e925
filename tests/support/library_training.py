# SPDX-License-Identifier: Apache-2.0
"""Runs a case of `library_cases` on a rank, and undoes what its library did to the process."""

import gc
import importlib
import os

from support.library_cases import CASES
from support.world import without_warnings


def train(function, name, folder):
    """Call ``function`` of ``support.LIBRARY_training`` for the case "LIBRARY/case"."""
    environment = dict(os.environ)
    library, case = name.split("/")
    try:
        return without_warnings(_train, library, function, CASES[library][case], folder)
    finally:
        os.environ.clear()
        os.environ.update(environment)


def _train(library, function, case, folder):
    training = importlib.import_module(f"support.{library}_training")
    gc.freeze()  # Accelerate collects garbage often, of which imported modules are none
    return getattr(training, function)(case, folder)
