# SPDX-License-Identifier: Apache-2.0
"""Messages of fewer bytes: how close the numbers come back, for any size, magnitude and dtype."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.torch.comm import codecs as quantise
from fullshard.torch.comm.codecs import BlockCodec, CastCodec, add_up, decode, encode

FP8 = torch.float8_e4m3fn
CODECS = {
    "bf16": CastCodec(),
    "int8": BlockCodec(32),
    "int8, large blocks": BlockCodec(96),
    "fp8": BlockCodec(32, FP8),
}

names = st.sampled_from(sorted(CODECS))
sizes = st.integers(1, 300)
seeds = st.integers(0, 2**16)


def numbers_of(ranks, numel, seed, magnitudes=8):
    """Numbers whose magnitudes differ by many powers of two, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    mantissas = torch.randn(ranks, numel, generator=generator)
    exponents = torch.randint(-magnitudes, magnitudes, (ranks, numel), generator=generator)
    zeros = torch.rand(ranks, numel, generator=generator) < 0.1
    return torch.ldexp(mantissas, exponents).masked_fill(zeros, 0.0)


def messages_of(codec, numbers, residual=None):
    ranks, numel = numbers.shape
    messages = torch.full((ranks, codec.message_bytes(numel)), 255, dtype=torch.uint8)
    encode(codec, numbers, messages, residual)
    return messages


def there_and_back(codec, numbers):
    out = torch.full_like(numbers, torch.nan)
    decode(codec, messages_of(codec, numbers), out)
    return out


def largest_in_block(numbers, block):
    """For each number the largest magnitude of its block."""
    parts = [part.abs().amax(1, keepdim=True).expand_as(part) for part in numbers.split(block, 1)]
    return torch.cat(parts, 1)


def error_bound(codec, numbers):
    if isinstance(codec, CastCodec):
        return numbers.abs() * 2.0**-8
    largest = largest_in_block(numbers, codec.block_numel)
    if codec.dtype is torch.int8:
        return largest / 127 / 2
    # Half of the last of three bits, or of the least difference that e4m3 knows.
    return torch.maximum(numbers.abs() * 2.0**-4, largest / 448 * 2.0**-10)


@settings(max_examples=40)
@given(names, st.integers(1, 3), sizes, seeds)
def test_numbers_come_back_within_the_bound(name, ranks, numel, seed):
    codec = CODECS[name]
    numbers = numbers_of(ranks, numel, seed)
    bound = error_bound(codec, numbers) * (1 + 1e-5)
    assert ((there_and_back(codec, numbers) - numbers).abs() <= bound).all()


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("exponent", [-149, -130, -126, -120, 100, 127])
def test_the_ends_of_the_range(name, exponent):
    numbers = torch.ldexp(torch.linspace(-1, 1, 64).view(1, -1), torch.tensor(exponent))
    back = there_and_back(CODECS[name], numbers)
    # Below the least normal number a scale is not made smaller.
    least = torch.finfo(torch.float32).tiny
    assert ((back - numbers).abs() <= error_bound(CODECS[name], numbers) * 1.001 + least).all()


@pytest.mark.parametrize("name", CODECS)
def test_zeros_stay_zeros(name):
    assert torch.equal(there_and_back(CODECS[name], torch.zeros(2, 70)), torch.zeros(2, 70))


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", [0, 33, 99])
def test_what_is_not_finite_does_not_get_lost(bad, dtype, place):
    for name, codec in CODECS.items():
        if not codec.takes(dtype):
            continue
        numbers = torch.ones(1, 100, dtype=dtype)
        numbers[0, place] = bad
        finite = there_and_back(codec, numbers).isfinite()[0]
        block = getattr(codec, "block_numel", 1)
        in_block = torch.arange(100) // block == place // block
        assert torch.equal(finite, ~in_block), name


def test_every_float8_is_what_torch_makes_of_it():
    bits = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    bits = bits[(bits & 0x7F) != 0x7F]  # without the NaNs
    codes, out = bits.view(FP8), torch.empty(len(bits))
    quantise._copy_float8(codes, out)
    assert torch.equal(out, codes.float())


@settings(max_examples=40)
@given(names, st.integers(1, 3), sizes, seeds)
def test_sent_and_residual_are_what_was_to_be_sent(name, ranks, numel, seed):
    codec = CODECS[name]
    numbers, before = numbers_of(ranks, numel, seed), numbers_of(ranks, numel, seed + 1)
    residual = before.bfloat16()
    wanted = numbers + residual.float()
    out = torch.empty_like(numbers)
    decode(codec, messages_of(codec, numbers, residual), out)
    assert ((out - wanted).abs() <= error_bound(codec, wanted) * (1 + 1e-5)).all()
    rest = wanted - out
    assert torch.equal(residual, rest.bfloat16())


@pytest.mark.parametrize("name", CODECS)
def test_what_is_not_finite_leaves_no_residual(name):
    codec = CODECS[name]
    numbers, residual = torch.ones(1, 64), torch.zeros(1, 64, dtype=torch.bfloat16)
    numbers[0, 5] = torch.nan
    numbers[0, 40] = torch.inf
    messages_of(codec, numbers, residual)
    assert residual.isfinite().all()
    assert residual[0, 5] == residual[0, 40] == 0


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("piece_numel", [1, 64, 200, 1000])
def test_pieces_change_nothing(name, piece_numel, monkeypatch):
    codec, numbers = CODECS[name], numbers_of(5, 333, 0)
    rows = torch.empty(5, 1000)[:, 100:433].copy_(numbers)  # not one behind the other

    def all_of_it():
        residual = numbers_of(5, 333, 1).bfloat16()
        messages, out = messages_of(codec, rows, residual), torch.empty(5, 333)
        decode(codec, messages, out)
        total = torch.empty(333)
        add_up(codec, messages, numbers[0], 2, total)
        return messages, residual, out, total

    whole = all_of_it()
    monkeypatch.setattr(quantise, "_PIECE_NUMEL", piece_numel)
    assert all(torch.equal(a, b) for a, b in zip(whole, all_of_it(), strict=True))
