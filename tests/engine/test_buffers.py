# SPDX-License-Identifier: Apache-2.0
"""Flat buffers: views that outlive their memory, in one storage, of any size."""

import pytest
import torch

from fullshard.torch.unit.buffers import Division, FlatBuffer, lie_alike

CPU = torch.device("cpu")


def test_views_stay_valid_while_memory_comes_and_goes():
    buffer = FlatBuffer([(8, torch.float32), (4, torch.bfloat16), (0, torch.float64)], CPU)
    first, second, empty = buffer.flats
    assert (first.numel(), second.numel(), empty.numel()) == (8, 4, 0)
    assert buffer.bytes == 64
    buffer.release()
    assert not buffer.allocated
    buffer.allocate()
    first.fill_(1)
    second.fill_(2)
    assert first.tolist() == [1] * 8
    assert second.tolist() == [2] * 4


def test_a_single_flat_is_no_view_and_behaves_alike():
    buffer = FlatBuffer([(8, torch.float64)], CPU)
    before = buffer.flats[0]._version
    buffer.release()
    buffer.allocate()
    assert buffer.flats[0]._version == before  # memory is not a change of the values
    assert buffer.flats[0].fill_(3).sum() == 24


def test_large_buffers_for_which_huge_pages_are_asked():
    numel = 2**23 + 5  # 32 MiB and a part of a page
    buffer = FlatBuffer([(numel, torch.float32)], CPU)
    for value in (1.0, 2.0):
        buffer.release()
        buffer.allocate()
        flat = buffer.flats[0].fill_(value)
        assert flat[:: 2**20].tolist() == [value] * 9
        assert flat[-1] == value


@pytest.mark.parametrize("divisor", [1, 3, 8, 0.7])
@pytest.mark.parametrize(
    ("travels", "rests"),
    [("bfloat16", "float32"), ("float16", "float32"), ("float32", "bfloat16"), ("float32",) * 2],
)
def test_a_cast_and_a_division_in_one_pass_equal_two(travels, rests, divisor):
    torch.manual_seed(0)
    # Down to the smallest numbers of fp16, half of which a division in fp16 would lose.
    flat = (torch.randn(4096) * torch.logspace(-8, 4, 4096)).to(getattr(torch, travels))
    found = []
    for one_pass in (True, False):
        to = torch.empty(4096, dtype=getattr(torch, rests))
        Division(one_pass=one_pass)(to, flat, divisor)
        found.append(to)
    assert torch.equal(*found)
    assert torch.equal(found[0], flat.to(to.dtype).div(divisor))
    assert not found[0].isnan().any()


def test_what_lies_alike_is_one_tensor_for_both():
    small, odd = [(32, torch.float32), (16, torch.float32)], [(33, torch.float32)]
    low = [(numel, torch.bfloat16) for numel, _ in small]
    assert lie_alike(small, small)
    assert lie_alike(small, low)
    assert not lie_alike([(8, torch.float32)] * 2, [(8, torch.bfloat16)] * 2)  # 32 and 16 bytes
    assert not lie_alike(small, odd)
    assert not lie_alike([*small, (1, torch.int8)], [*small, (1, torch.int8)])
    assert not lie_alike([], [])
    for sizes in (small, low):
        (whole,) = FlatBuffer(sizes, torch.device("cpu")).by_dtype
        assert (whole.numel(), whole.dtype) == (48, sizes[0][1])
    mixed = FlatBuffer([*small, (1, torch.int8)], torch.device("cpu"))
    assert mixed.by_dtype is mixed.flats
    assert FlatBuffer([], torch.device("cpu")).by_dtype == []
