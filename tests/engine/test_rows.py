# SPDX-License-Identifier: Apache-2.0
"""Behind `fully_shard` parameters are DTensors, as PyTorch's are, and state dicts their memory."""

import pytest
from support import rows_workers as workers
from support.threads import on_ranks
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from fullshard.core.errors import ConfigurationError, NotSupportedError
from fullshard.torch import fully_shard


@pytest.mark.parametrize("along", [False, True], ids=["rows", "second dims"])
@pytest.mark.parametrize(("size", "shape"), [(3, (3,)), (4, (2, 2))], ids=["1-D", "2-D"])
def test_placements_rows_and_steps_are_pytorchs(gloo_world, size, shape, along):
    gloo_world.run_joined(size, workers.beside_pytorchs, None, size, shape, along)


def test_what_is_written_to_a_state_dict_is_in_the_model(gloo_world, tmp_path):
    for went_on, loaded in gloo_world.run_joined(2, workers.written_state_dicts, None, tmp_path):
        assert loaded == pytest.approx(went_on, rel=1e-6)


def test_pickles_hold_pytorchs_own_dtensors(gloo_world):
    gloo_world.run_joined(2, workers.pickled, None)


def test_weights_on_the_first_rank_beside_meta(gloo_world):
    for told in gloo_world.run_joined(3, workers.first_rank_has_the_weights, None):
        assert "came from the meta device" in told


def test_operations_give_what_dtensor_gives(gloo_world):
    for wrong, compared in gloo_world.run_joined(3, workers.operations, None):
        assert wrong == {}
        assert compared >= 100


def test_operations_in_place_return_and_change_the_parameter(gloo_world):
    assert gloo_world.run_joined(2, workers.operations_in_place, None) == [[], []]


def test_adafactor_steps_as_on_one_process(gloo_world):
    for differences in gloo_world.run_joined(2, workers.adafactor, None):
        assert max(differences) < 1e-6


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"align": "column"}, ConfigurationError, r"align must be one of .*'column'"),
        ({"shard_placement_fn": lambda _: Shard(2)}, ConfigurationError, "one of its dimensions"),
        ({"shard_placement_fn": lambda _: Replicate()}, ConfigurationError, "must give Shard"),
        ({"shard_placement_fn": lambda _: Shard(1)}, NotSupportedError, "dealt out evenly to 2"),
        (
            {"shard_placement_fn": lambda _: Shard(1), "align": "element"},
            NotSupportedError,
            'leave align="row"',
        ),
    ],
)
@on_ranks(2)
def test_what_is_no_placement_is_refused(comm, options, error, match):
    layer = nn.Linear(3, 4, bias=False)
    with pytest.raises(error, match=match):
        fully_shard(layer, mesh=comm, **options)
    assert type(layer) is nn.Linear
