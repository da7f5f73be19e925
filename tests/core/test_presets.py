# SPDX-License-Identifier: Apache-2.0
import pytest

from fullshard.core.errors import ConfigurationError
from fullshard.core.presets import (
    TRANSFORMERS,
    parameter_numel,
    training_flops_per_token,
    transformer,
)


@pytest.mark.parametrize(
    ("name", "numel"), [("llama3-8b", 8_030_261_248), ("llama3-70b", 70_553_706_496)]
)
def test_published_parameter_counts(name, numel):
    assert parameter_numel(TRANSFORMERS[name]) == numel


def test_gpt2_presets_are_of_their_size():
    # Their own counts are 124.4 M and 1,557.6 M, with learned positions and biases.
    assert parameter_numel(TRANSFORMERS["gpt2-124m"]) == pytest.approx(124.4e6, rel=0.01)
    assert parameter_numel(TRANSFORMERS["gpt2-xl"]) == pytest.approx(1557.6e6, rel=0.01)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_heads_divide(name):
    shape = TRANSFORMERS[name]
    assert shape.width % shape.heads == 0
    assert shape.heads % shape.kv_heads == 0
    assert shape.head_width % 2 == 0  # rotary positions turn pairs


def test_flops_of_llama3_8b():
    # 6 * (8,030,261,248 - 128,256 * 4096) + 12 * 32 * 4096 * 8192
    assert training_flops_per_token(TRANSFORMERS["llama3-8b"], 8192) == 57_914_449_920


def test_flops_count_a_tied_embedding_that_multiplies():
    shape = TRANSFORMERS["gpt2-124m"]
    assert training_flops_per_token(shape, 0) == 6 * parameter_numel(shape)


def test_an_unknown_preset_is_refused_with_the_nearest():
    with pytest.raises(ConfigurationError, match="did you mean 'llama3-8b'"):
        transformer("llama-8b")
