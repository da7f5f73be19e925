# SPDX-License-Identifier: Apache-2.0
"""Ranks that loop over parameters in orders of their own, as over a set."""

import pytest
import torch
from support import order_workers as workers
from support.models import seeded
from torch import nn

from fullshard.core.errors import ConfigurationError
from fullshard.testing import LocalWorld
from fullshard.torch import FullyShardedDataParallel, save_full_weights

pytestmark = pytest.mark.usefixtures("checked_values")


def test_states_of_optimizers_go_by_name_behind_the_wrapper(gloo_world):
    gloo_world.run(3, workers.fsdp1_states)


def test_states_of_optimizers_go_by_name_behind_the_function(gloo_world):
    for text in gloo_world.run(3, workers.fsdp2_states):
        assert text is not None, "numbered state dicts were mixed"
        assert "parameter 0: " in text
        assert "get_optimizer_state_dict" in text


def test_norms_and_sums_of_different_parameters_are_not_mixed(gloo_world):
    answers = gloo_world.run(2, workers.orders_of_norms)
    assert answers[0]["norms"] == answers[1]["norms"]
    for found in answers:
        for what in ("clip", "norm", "sum", "max", "any"):
            assert found[what] is not None, what
            assert found[what].startswith("UsageError: this rank takes"), found[what]
            assert "same order" in found[what]
        assert found["state dict"] is None  # of DTensors, for which nothing is sent
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6), nn.Linear(6, 4))
    plain(torch.ones(1, 6)).sum().backward()
    expected = [float(param.grad.norm()) for param in plain.parameters()]
    assert answers[0]["norms"] == pytest.approx(expected)
    assert answers[0]["total"] == pytest.approx(sum(norm**2 for norm in expected) ** 0.5)


def test_two_models_with_the_same_names_stay_apart():
    def body(comm):
        models = [nn.Linear(3, 2), nn.Linear(3, 2)]
        for number, model in enumerate(models):
            for param in model.parameters():
                nn.init.constant_(param, number)
        models = [FullyShardedDataParallel(model, comm) for model in models]
        turned = models[:: -1 if comm.rank else 1]
        params = [param.detach() for model in turned for param in model.parameters()]
        return [float(norm) for norm in torch._foreach_norm(params)]

    first, second = LocalWorld(2).run(body)
    assert first[2:] == second[:2]
    assert first[:2] == second[2:] == [0.0, 0.0]


def test_a_file_of_weights_whose_entries_differ_is_not_begun(tmp_path):
    def body(comm):
        model = FullyShardedDataParallel(seeded(lambda: nn.Linear(3, 2)), comm)
        for name in ("a", "b")[:: -1 if comm.rank else 1]:
            model.module.register_buffer(name, torch.ones(2))
        with pytest.raises(ConfigurationError, match=r"entry \d: "):
            save_full_weights(model, tmp_path / "weights")

    LocalWorld(2).run(body)
    assert not list(tmp_path.iterdir())
