# SPDX-License-Identifier: Apache-2.0
"""Optimizers of other libraries over owned matrices: as in one process, and nothing is sent."""

import pytest
from support.owned_matrices import (
    Counted,
    alone,
    assert_equal,
    batch,
    full,
    kind_of,
    loss_of,
    muon_and_adamw,
    sharded,
    train,
)

from fullshard.core.errors import NotSupportedError
from fullshard.testing import LocalWorld
from fullshard.torch import exchange_matrices

ADMITTED = [
    *(f"pytorch_optimizer.{name}" for name in ("CAME", "SOAP")),
    *("schedulefree.AdamWScheduleFree", "transformers.optimization.Adafactor"),
    "bitsandbytes.optim.LAMB8bit",
]
IN_SURVEYS = [
    *(f"pytorch_optimizer.{name}" for name in ("AdaFactor", "AdaMuon", "AdamP", "Lamb", "Lion")),
    *(
        f"pytorch_optimizer.{name}"
        for name in ("LARS", "Muon", "NorMuon", "SCION", "SM3", "Shampoo")
    ),
    *(f"bitsandbytes.optim.{name}" for name in ("AdamW8bit", "Lion8bit")),
]


def maker(kind, **options):
    def make(params, lr, weight_decay):
        groups = [{"params": params, "use_muon": True}] if "Muon" in kind.__name__ else params
        optimizer = kind(groups, **options)
        if hasattr(optimizer, "train"):
            optimizer.train()
        return optimizer

    return lambda model: muon_and_adamw(model, muon=make)


@pytest.mark.long
@pytest.mark.parametrize(
    "path", [*ADMITTED, *(pytest.param(path, marks=pytest.mark.thorough) for path in IN_SURVEYS)]
)
def test_optimizers_are_those_of_one_process_and_send_nothing(path, monkeypatch):
    make = maker(kind_of(path))
    counted = Counted(monkeypatch)

    def body(comm):
        model = sharded(comm)
        optimizers = make(model)
        train(model, optimizers, comm.rank, step_by=counted.step)
        values = full(model)
        assert optimizers[0].state_dict()["state"].keys() == set(range(9))
        return values

    results = LocalWorld(3).run(body)
    expected = alone(3, make=make)
    for values in results:
        assert_equal(values, expected)
    assert counted.calls == []


@pytest.mark.parametrize("path", ["prodigyopt.Prodigy", "dadaptation.DAdaptAdam"])
def test_estimates_of_one_step_size_are_refused(path):
    kind = kind_of(path)

    def body(comm):
        model = sharded(comm, align="element")
        optimizer = kind(model.parameters())
        with pytest.raises(NotSupportedError, match="cannot step parameters one by one"):
            exchange_matrices(optimizer)

    LocalWorld(2).run(body)


def test_an_option_that_looks_beyond_a_matrix_is_refused():
    make = maker(kind_of("pytorch_optimizer.Lamb"), pre_norm=True)

    def body(comm):
        model = sharded(comm)
        loss_of(model, batch(0, 0)).backward()
        with pytest.raises(NotSupportedError, match="in another way if there are others"):
            make(model)[0].step()

    LocalWorld(2).run(body)
