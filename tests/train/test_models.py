# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fullshard.core.presets import TRANSFORMERS, Transformer, parameter_numel
from fullshard.train.config import resolve
from fullshard.train.torch.launch import build_model
from fullshard.train.torch.models import GPT, DigitNet, Rotary

SHAPE = Transformer(2, 32, 4, 2, 48, 64, context=16)


@pytest.mark.long
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_parameter_count_is_that_of_the_preset(name):
    shape = TRANSFORMERS[name]
    with torch.device("meta"):
        model = GPT(shape, context=8)
    assert sum(param.numel() for param in model.parameters()) == parameter_numel(shape)


def test_digit_net_has_the_parameters_of_the_well_known_example():
    assert sum(param.numel() for param in DigitNet().parameters()) == 1_199_882


def test_a_position_sees_only_itself_and_those_before():
    torch.manual_seed(0)
    model = GPT(SHAPE)
    tokens = torch.randint(0, 64, (2, 16))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 64
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.isclose(before[:, 9:], after[:, 9:]).all(-1).any()


def test_attention_depends_on_distance_not_on_place():
    rotary = Rotary(8, context=32, theta=100.0)
    torch.manual_seed(0)
    query, key = torch.randn(2, 8)
    turned_query = rotary(query.expand(1, 1, 32, 8))[0, 0]
    turned_key = rotary(key.expand(1, 1, 32, 8))[0, 0]
    scores = turned_query @ turned_key.T
    for distance in (0, 3, 10):
        diagonal = scores.diagonal(-distance)
        assert torch.allclose(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5)
    assert not torch.isclose(scores[3, 0], scores[10, 0])


def test_tied_output_is_the_embedding():
    model = GPT(Transformer(1, 32, 4, 4, 48, 64, context=8, tied=True))
    assert model.output.weight is model.embedding.weight


def test_initial_loss_is_that_of_guessing():
    torch.manual_seed(0)
    model = GPT(SHAPE)
    tokens = torch.randint(0, 64, (8, 16))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    assert loss.item() == pytest.approx(torch.tensor(64.0).log().item(), abs=0.1)


def test_bfloat16_is_for_parameters_not_for_angles():
    plain = build_model(resolve(overrides=["train.dtype=bfloat16"]))
    assert {param.dtype for param in plain.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in plain.buffers()} == {torch.float32}
    assert plain(torch.zeros(1, 4, dtype=torch.int64)).dtype == torch.bfloat16


def test_digit_flops_are_three_forwards():
    with torch.device("meta"), FlopCounterMode(display=False) as counter, torch.no_grad():
        DigitNet()(torch.empty(1, 1, 28, 28))
    assert resolve(model="mnist").flops_per_token == 3 * counter.get_total_flops()


def test_digit_net_gives_log_probabilities():
    output = DigitNet().eval()(torch.randn(3, 1, 28, 28))
    assert torch.allclose(output.exp().sum(1), torch.ones(3))
