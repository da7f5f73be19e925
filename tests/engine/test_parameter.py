# SPDX-License-Identifier: Apache-2.0
"""A sharded parameter is honest: global where it can be, and a refusal everywhere else."""

import copy
import io
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.spans import drawn, sharded
from support.threads import on_ranks
from torch import Tensor, nn

from fullshard.core.errors import NotSupportedError, UnshardedOperationError
from fullshard.core.layout import ALIGN_NUMEL, Span
from fullshard.testing import LocalComm, LocalWorld
from fullshard.torch import fully_shard
from fullshard.torch.tensor.ownership import Ownership
from fullshard.torch.tensor.parameter import ShardedParameter
from fullshard.torch.tensor.reductions import GlobalScalar

SHAPES = [(5, 7), (), (33,), (1,), (16, 4), (3, 2, 5), (2, 50), (4, 0)]


def values(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return drawn(SHAPES, seed, dtype)


def one(comm: LocalComm, full: Tensor) -> ShardedParameter:
    return sharded(comm, [full])[0]


# ---- what it is ---------------------------------------------------------------------------------


def test_it_is_a_parameter_of_global_shape_that_holds_a_span():
    full = torch.arange(100.0).view(4, 25)

    def body(comm):
        param = one(comm, full)
        assert isinstance(param, nn.Parameter)
        assert param.is_leaf
        assert param.requires_grad
        assert (param.shape, param.dim(), param.numel(), len(param)) == ((4, 25), 2, 100, 4)
        assert param.stride() == (25, 1)
        assert param.device_mesh is None
        span = param.span
        assert torch.equal(param.local, full.view(-1)[span.start : span.stop])
        assert f"span=[{span.start}, {span.stop})" in repr(param)
        assert repr(param).startswith("ShardedParameter('p0', shape=(4, 25), dtype=torch.float32")
        assert next(iter(nn.ParameterList([param]).parameters())) is param
        assert not isinstance(ShardedParameter.value(param.local, param.ownership), nn.Parameter)
        return span

    assert LocalWorld(3).run(body) == [Span(0, 64), Span(64, 100), Span(100, 100)]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=5))
def test_any_tiling_gives_the_full_tensor_and_norm(lengths):
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    spans = tuple(Span(end - n, end) for n, end in zip(lengths, ends, strict=True))
    full = torch.sin(torch.arange(float(ends[-1]), dtype=torch.float64))

    def body(comm):
        own = Ownership("x", tuple(full.shape), spans, comm)
        value = ShardedParameter.value(own.cut(full).clone(), own)
        assert torch.equal(value.full_tensor(), full)
        torch.testing.assert_close(value.norm().full_tensor(), full.norm(), rtol=1e-12, atol=0)

    LocalWorld(len(lengths)).run(body)


def test_a_loss_of_full_tensors_gives_gradients():
    full = torch.arange(60.0, dtype=torch.float64).view(5, 12)
    expected = full.clone().requires_grad_()
    (expected.square().sum() + expected.exp().mean()).backward()

    def body(comm):
        param = one(comm, full)
        (param.full_tensor().square().sum() + param.exp().mean()).backward()
        assert torch.equal(param.grad.full_tensor(), expected.grad)
        with torch.no_grad():
            assert not param.full_tensor().requires_grad

    LocalWorld(3).run(body)


def test_reading_gradients_and_data():
    full = torch.arange(60.0).view(5, 12)

    def body(comm):
        param = one(comm, full)
        assert param.grad is None
        param.grad = ShardedParameter.value(torch.ones_like(param.local), param.ownership)
        assert type(param.grad) is ShardedParameter
        param.grad = None
        for same in (param.data, param.detach()):
            assert type(same) is ShardedParameter
            assert not same.requires_grad
            assert same.local.data_ptr() == param.local.data_ptr()
        param.data = full + 1
        assert torch.equal(param.full_tensor(), full + 1)
        param.data = param.data
        with pytest.raises(NotSupportedError, match=r"'p0'.*as by model.to"):
            param.data = full.double()
        frozen = param.requires_grad_(False)
        assert frozen is param
        return param.requires_grad

    assert LocalWorld(2).run(body) == [False, False]


@on_ranks(3)
def test_data_that_was_read_keeps_its_values(comm):
    """As averages of weights are tried: the weights are kept aside and put back afterwards."""
    full, average = torch.arange(60.0).view(5, 12), torch.ones(5, 12)
    layer = nn.Linear(12, 5, bias=False)
    nn.init.zeros_(layer.weight)
    for param in (one(comm, full), fully_shard(layer, mesh=comm).weight):
        param.data = full
        views = [
            param.data,
            param.detach(),
            param.data.data,
            param.data.view(-1),
            param.detach()[1:4],
        ]
        expected = [full, full, full, full.view(-1), full[1:4]]
        with torch.inference_mode():
            param.data = average
        assert all(map(torch.equal, [view.full_tensor() for view in views], expected))
        kept, *_, rows = views
        rows.mul_(3)
        assert torch.equal(kept.full_tensor()[1:4], 3 * full[1:4])
        rows.div_(3)
        some = param[:2]
        some.data = torch.full((2, 12), 7.0)  # writes to the parameter, and its views show it
        assert torch.equal(param.data.full_tensor()[:2], torch.full((2, 12), 7.0))
        param.data = 2 * average
        param.data = kept
        kept.zero_()
        assert torch.equal(param.full_tensor(), full)
        shown = param.data
        shown.mul_(2)
        assert torch.equal(param.full_tensor(), 2 * full)
        other = ShardedParameter.value(param.local + 1, param.ownership)
        param.data, other = other, param.data
        assert torch.equal(param.full_tensor(), 2 * full + 1)
        assert torch.equal(other.full_tensor(), 2 * full)


@on_ranks(2)
def test_modules_that_hold_it_convert_or_refuse(comm):
    layer = nn.Linear(3, 4)
    layer.weight = one(comm, torch.ones(4, 3))
    weight = layer.weight
    assert layer.float().weight is weight
    assert layer.to("cpu").weight is weight
    with pytest.raises(NotSupportedError, match="bfloat16"):
        layer.to(torch.bfloat16)
    assert weight.dtype is torch.float32
    converted = weight.detach().to(torch.bfloat16)
    assert type(converted) is ShardedParameter
    assert converted.local.dtype is torch.bfloat16 is converted.dtype
    layer.load_state_dict({"weight": torch.full((4, 3), 2.0), "bias": torch.zeros(4)})
    assert torch.equal(weight.full_tensor(), torch.full((4, 3), 2.0))
    assert type(layer.state_dict()["weight"]) is ShardedParameter


@on_ranks(2)
def test_copies_have_elements_of_their_own_and_pickles_are_refused(comm):
    param = one(comm, torch.ones(40))
    twice = copy.deepcopy([param, param])
    assert twice[0] is twice[1]
    assert isinstance(twice[0], nn.Parameter)
    assert twice[0].ownership is param.ownership
    if param.span.numel:
        assert twice[0].local.data_ptr() != param.local.data_ptr()
    assert copy.copy(param).local is param.local
    for save in (pickle.dumps, lambda x: torch.save(x, io.BytesIO())):
        with pytest.raises(UnshardedOperationError, match=r"'p0'.*save_full_weights"):
            save(param)


# ---- elementwise --------------------------------------------------------------------------------

ELEMENTWISE = {
    "arithmetic": lambda x, y: (2 * x + y / 3 - 1) ** 2,
    "unary": lambda x, y: -x.abs().sqrt().exp().sign(),
    "compare": lambda x, y: torch.where(x > y, x, 0.0),
    "fused arithmetic": lambda x, y: x.addcmul(x, y, value=0.5).addcdiv(y, x.abs() + 1),
    "lerp": lambda x, y: x.lerp(y, 0.3),
    "in place": lambda x, y: x.clone().mul_(2).add_(y, alpha=3).clamp_(-1, 1),
    "masked": lambda x, y: x.clone().masked_fill_(y > 0, 7.0),
    "index_put": lambda x, y: x.clone().index_put_((y > 0,), torch.tensor(2.0)),
    "likes": lambda x, y: torch.ones_like(x) + torch.full_like(x, 2) + torch.zeros_like(y),
    "0-dim": lambda x, y: x * torch.tensor(0.5),
    "cast": lambda x, y: x.double() + y.bfloat16(),
    "out": lambda x, y: torch.add(x, y, out=torch.empty_like(x)),
    "round": lambda x, y: x.div(y, rounding_mode="floor"),
    "reshape": lambda x, y: x.flatten().add(1).view_as(y).unsqueeze(0).squeeze(0),
    "two results": lambda x, y: torch.frexp(x)[0],
    "foreach": lambda x, y: torch._foreach_add([x, y], [y, x], alpha=2)[1],
    "foreach maximum": lambda x, y: torch._foreach_maximum([x], [y])[0],
    "foreach scalars": lambda x, y: torch._foreach_mul([x, y], [2.0, 3.0])[1],
}
if hasattr(torch, "_foreach_clone"):  # not in torch 2.11
    ELEMENTWISE["foreach clone"] = lambda x, y: torch._foreach_clone([x, y])[1]


@pytest.mark.parametrize("name", ELEMENTWISE)
@on_ranks(3)
def test_elementwise_operations_run_on_the_spans(comm, name):
    work = ELEMENTWISE[name]
    shaped = [0, 2, 3, 4, 5, 6, 7]  # not the 0-dim one, which a mask cannot index
    fulls = [(values(0)[i], values(1)[i]) for i in shaped]
    xs = sharded(comm, [x for x, _ in fulls])
    ys = sharded(comm, [y for _, y in fulls])
    with torch.no_grad():
        for x, y, (full_x, full_y) in zip(xs, ys, fulls, strict=True):
            y.ownership = x.ownership
            got, want = work(x, y), work(full_x, full_y)
            assert type(got) is ShardedParameter
            assert (got.shape, got.dtype) == (want.shape, want.dtype)
            assert torch.equal(got.full_tensor(), want)


@on_ranks(3)
def test_a_plain_tensor_of_the_global_shape_is_cut_to_the_span(comm):
    full, other = torch.arange(60.0).view(5, 12), torch.sin(torch.arange(60.0)).view(5, 12)
    param = one(comm, full).detach()
    assert torch.equal((param + other).full_tensor(), full + other)
    assert torch.equal((other - param).full_tensor(), other - full)
    assert param.copy_(other.t().contiguous().t()) is param
    assert torch.equal(param.full_tensor(), other)
    param.lerp_(full, 0.9)  # an exponential moving average
    assert torch.equal(param.full_tensor(), other.lerp(full, 0.9))
    torch._foreach_copy_([param], [full])
    assert torch.equal(param.full_tensor(), full)


@on_ranks(2)
def test_operands_that_do_not_fit_are_refused(comm):
    param = one(comm, torch.ones(5, 12)).detach()
    own = param.ownership
    with pytest.raises(UnshardedOperationError, match=r"shape \(12,\) does not fit .*'p0'"):
        torch.add(param, torch.ones(12))
    moved = (Span(0, 10), Span(10, 60))
    other = ShardedParameter.value(
        torch.ones(moved[comm.rank].numel), Ownership("q", (5, 12), moved, comm)
    )
    with pytest.raises(UnshardedOperationError, match=r"not cut alike: .*'p0'.*'q'"):
        param.copy_(other)
    with pytest.raises(UnshardedOperationError, match="not cut alike"):
        torch._foreach_add_([param], [other])
    renamed = ShardedParameter.value(
        param.local, Ownership("renamed", own.shape, tuple(own.spans), comm)
    )
    assert torch.equal((param + renamed).full_tensor(), torch.full((5, 12), 2.0))


@on_ranks(2)
def test_a_span_is_never_written_into_a_plain_tensor(comm):
    param = one(comm, torch.ones(5, 12)).detach()
    plain = torch.zeros(5, 12)
    for write in (
        lambda: plain.copy_(param),
        lambda: plain.add_(param),
        lambda: torch.add(param, 1, out=plain),
        lambda: torch._foreach_copy_([plain], [param]),
        lambda: torch._foreach_add_([plain], [param]),
    ):
        with pytest.raises(UnshardedOperationError, match=r"'p0'.*full_tensor\(\)"):
            write()
    assert not plain.any()
    number, scalar = torch.zeros(()), one(comm, torch.ones(())).detach()
    with pytest.raises(UnshardedOperationError, match="into a plain tensor"):
        torch._foreach_add_([number], [scalar])
    assert number == 0


@on_ranks(2)
def test_writing_counts_as_a_change_of_the_buffer(comm):
    flat = torch.zeros(96)
    own = Ownership("w", (48 * comm.size,), tuple(Span(48 * r, 48 * r + 48) for r in (0, 1)), comm)
    param = ShardedParameter.parameter(flat[16:64], own)
    writes = (
        lambda: param.add_(1),
        lambda: param.normal_(),
        lambda: torch._foreach_mul_([param], 2),
        lambda: torch.add(param, 1, out=param.detach()),
    )
    with torch.no_grad():
        for write in writes:
            before = flat._version
            write()
            assert flat._version > before
    assert not flat[:16].any()
    assert not flat[64:].any()


FOLDED = {
    "sum": lambda x: x.sum(),
    "sum in another dtype": lambda x: x.sum(dtype=torch.float64),
    "how many": lambda x: (x > 0).sum(),
    "mean": lambda x: x.mean(),
    "mean of magnitudes": lambda x: x.abs().mean(),
    "largest": lambda x: x.max(),
    "smallest": lambda x: x.min(),
    "smallest of integers": lambda x: x.mul(9).to(torch.int64).min(),
    "with NaN": lambda x: x.div(0).mul(0).max(),
    "with infinity": lambda x: x.div(0).min(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FOLDED)
def test_numbers_about_the_whole_are_global(name, dtype):
    full = torch.randn(5, 12, generator=torch.Generator().manual_seed(3)).to(dtype)
    wanted = FOLDED[name](full)

    def body(comm):
        return FOLDED[name](one(comm, full).detach())

    for size in (1, 2, 7):
        for found in LocalWorld(size).run(body):
            found = found.full_tensor()
            assert found.dtype == wanted.dtype
            torch.testing.assert_close(found, wanted, equal_nan=True)


REFUSED = {
    "sum of rows": lambda x: x.sum(1),
    "largest of rows": lambda x: x.max(1),
    "pad": lambda x: nn.functional.pad(x, (0, 1)),
    "column": lambda x: x[:, 0],
    "every other row": lambda x: x[::2],
    "number": lambda x: x[0, 0].item(),
    "mask": lambda x: x[x > 0],
    "iterate": lambda x: list(x),
    "matmul": lambda x: nn.functional.linear(torch.ones(2, 12), x),
    "transpose": lambda x: x.transpose(0, 1),
    "cat": lambda x: torch.cat([x, x]),
    "softmax": lambda x: x.softmax(0),
    "norm of rows": lambda x: x.norm(dim=1),
    "other dtype view": lambda x: x.view(torch.int32),
    "largest": lambda x: torch._foreach_max([x]),
    "sorted": lambda x: x.sort(),
    "set_": lambda x: x.set_(torch.ones(5, 12)),
    "resize_": lambda x: x.resize_(3),
    "sample": lambda x: x.bernoulli(),
    "share": lambda x: x.share_memory_(),
    "apply": lambda x: x.apply_(abs),
    "dlpack": lambda x: x.__dlpack__(),
    "vector": lambda x: nn.utils.parameters_to_vector([x]),
}


@pytest.mark.parametrize("name", REFUSED)
@on_ranks(2)
def test_what_needs_other_elements_is_refused_with_the_way_out(comm, name):
    param = one(comm, torch.ones(5, 12)).detach()
    with pytest.raises(UnshardedOperationError, match=r"'p0.*' of shape .*\.full_tensor\(\)"):
        REFUSED[name](param)


def test_of_all_foreach_operations_only_those_across_elements_are_refused():
    def body(comm):
        param = one(comm, torch.ones(40)).detach()
        refused = set()
        for name in dir(torch):
            if not name.startswith("_foreach_") or name == "_foreach_norm":
                continue
            for arguments in ((), (2.0,), ([param],), ([param], [param]), ([param], 0.5)):
                try:
                    getattr(torch, name)([param], *arguments)
                except UnshardedOperationError:
                    refused.add(name)
                except (TypeError, RuntimeError):
                    continue
        return refused

    (refused,) = LocalWorld(1).run(body)
    assert "_foreach_max" in refused
    assert refused <= {"_foreach_max", "_foreach_mm", "_foreach_powsum"}


# ---- norms and truth ----------------------------------------------------------------------------


@pytest.mark.parametrize("order", [0, 1, 2, 2.5, -1, math.inf, -math.inf])
@pytest.mark.parametrize("world", [1, 2, 5])
def test_norms_are_those_of_the_whole(order, world):
    fulls = values(dtype=torch.float64)[:-1]
    want = [torch.linalg.vector_norm(full, order) for full in fulls]

    def body(comm):
        params = sharded(comm, fulls)
        listed = torch._foreach_norm([param.detach() for param in params], order)
        for param, from_list, expected in zip(params, listed, want, strict=True):
            norm = torch.linalg.vector_norm(param, order)
            for got in (norm.detach(), from_list):
                assert isinstance(got, GlobalScalar)
                assert type(got.full_tensor()) is Tensor
                torch.testing.assert_close(got.full_tensor(), expected, rtol=1e-12, atol=0)
        return torch.stack(list(listed)).full_tensor()

    first, *others = LocalWorld(world).run(body)
    assert all(torch.equal(first, other) for other in others)


@on_ranks(3)
def test_low_precision_norms_are_rounded_once_and_sums_of_squares_do_not_overflow(comm):
    low, large = torch.full((3000,), 0.1, dtype=torch.bfloat16), torch.zeros(64)
    large[0] = large[40] = 1.5e19  # on two ranks; a square fits into fp32, the sum does not
    got = one(comm, low).detach().norm()
    assert got.dtype is torch.bfloat16
    assert got == low.float().norm().bfloat16()
    assert one(comm, large).detach().norm().item() == pytest.approx(1.5e19 * math.sqrt(2))


@on_ranks(2)
def test_a_global_scalar_is_a_plain_tensor_to_everything_else(comm):
    norm = one(comm, torch.ones(64)).detach().norm()
    assert float(norm) == norm.item() == 8.0
    assert isinstance(norm + 1, GlobalScalar)
    assert type(torch.zeros(2, 2) + norm) is Tensor
    target = torch.zeros(1)
    target += norm
    assert type(target) is Tensor
    scaled = one(comm, torch.ones(64)).detach() * norm
    assert type(scaled) is ShardedParameter
    file = io.BytesIO()
    torch.save(norm, file)
    file.seek(0)
    assert type(torch.load(file, weights_only=True)) is Tensor


@on_ranks(3)
def test_any_and_all_see_every_rank(comm):
    full = torch.zeros(100)
    full[70] = 1
    param = one(comm, full).detach()
    seen = (param > 0).any(), (param > 0).all(), (param >= 0).all(), (param > 1).any()
    assert [bool(each) for each in seen] == [True, False, True, False]


# ---- initialisation -----------------------------------------------------------------------------

INITS = {
    "uniform_": nn.init.uniform_,
    "normal_": nn.init.normal_,
    "trunc_normal_": nn.init.trunc_normal_,
    "trunc_normal_ in the tail": lambda x, generator: nn.init.trunc_normal_(
        x, a=2.0, b=3.0, generator=generator
    ),
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "kaiming_normal_": nn.init.kaiming_normal_,
    "orthogonal_": nn.init.orthogonal_,
    "constant_": lambda x, generator: nn.init.constant_(x, 3.0),
    "ones_": lambda x, generator: nn.init.ones_(x),
    "zeros_": lambda x, generator: nn.init.zeros_(x),
    "eye_": lambda x, generator: nn.init.eye_(x) if x.dim() == 2 else x,
    "dirac_": lambda x, generator: nn.init.dirac_(x) if x.dim() == 3 else x,
    "exponential_": lambda x, generator: x.exponential_(generator=generator),
    "cauchy_": lambda x, generator: x.cauchy_(generator=generator),
    "log_normal_": lambda x, generator: x.log_normal_(generator=generator),
    "geometric_": lambda x, generator: x.geometric_(0.3, generator=generator),
    "bernoulli_": lambda x, generator: x.bernoulli_(0.3, generator=generator),
    "random_": lambda x, generator: x.random_(0, 10, generator=generator),
    "rand_like": lambda x, generator: x.copy_(torch.rand_like(x, generator=generator)),
}


@pytest.mark.parametrize("name", INITS)
def test_initialisation_is_that_of_one_process_bit_for_bit(name):
    fill = INITS[name]
    shapes = [(5, 7), (16, 40), (3, 2, 5), (70, 3)]
    plain = [nn.Parameter(torch.zeros(shape)) for shape in shapes]

    def fill_all(params, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for param in params:
                fill(param, generator=generator)
        return generator.get_state()

    state = fill_all(plain, 1)

    def body(comm):
        params = sharded(comm, [torch.zeros(shape) for shape in shapes])
        assert torch.equal(fill_all(params, 1), state), "the generator has advanced equally"
        return [param.full_tensor() for param in params]

    for world in (1, 3):
        for result in LocalWorld(world).run(body):
            assert all(map(torch.equal, result, plain))


@on_ranks(2)
def test_initialisations_that_write_columns_are_refused(comm):
    with pytest.raises(UnshardedOperationError, match=r"full_tensor"):
        nn.init.sparse_(one(comm, torch.ones(4, 27)).detach(), 0.5)


WRITES = {
    "one row": lambda x: x[3].fill_(7),
    "the last": lambda x: x[-1].zero_(),
    "some": lambda x: x[1:4].mul_(2),
    "from the end": lambda x: x[-2:].neg_(),
    "beyond the end": lambda x: x[3:99].neg_(),
    "none": lambda x: x[4:2].zero_(),
    "set": lambda x: x.__setitem__(2, 5.0),
    "set to values": lambda x: x.__setitem__(slice(1, 3), torch.arange(24.0).view(2, 12)),
    "row of a row": lambda x: x[2][3:8].zero_(),
    "element": lambda x: x.__setitem__((4, 11), -1.0),
    "padding": lambda x: nn.Embedding(
        5, 12, padding_idx=1, _weight=x
    )._fill_padding_idx_with_zero(),
}


@pytest.mark.parametrize("write", WRITES)
def test_rows_are_views_of_what_each_rank_has_of_them(write):
    expected = torch.linspace(1, 2, 60).view(5, 12)
    start = expected.clone()
    WRITES[write](expected)

    def body(comm):
        param = one(comm, start).detach()
        flat, before = param.local, param.local._version
        WRITES[write](param)
        assert torch.equal(param.full_tensor(), expected)
        assert torch.equal(param[1:4].full_tensor(), expected[1:4])
        # counts even where nothing was written: that is what others go by
        assert flat._version > before

    for world in (1, 2, 3, 7):
        LocalWorld(world).run(body)


@pytest.mark.parametrize("index", [5, -6])
@on_ranks(2)
def test_a_row_that_is_not_there(comm, index):
    with pytest.raises(IndexError):
        one(comm, torch.ones(5, 12)).detach()[index]


@on_ranks(2)
def test_new_tensors_of_a_size_of_their_own_are_plain(comm):
    param = one(comm, torch.ones(5, 12)).detach()
    for made in (param.new_zeros(3), param.new_empty((5, 12)), param.new_tensor(1.0)):
        assert type(made) is Tensor
        assert made.dtype is param.dtype


def test_spans_start_where_kernels_see_the_same_alignment():
    def body(comm):
        return [param.span.start for param in sharded(comm, values()) if param.span.numel]

    assert all(start % ALIGN_NUMEL == 0 for starts in LocalWorld(5).run(body) for start in starts)


# ---- gradients of norms -------------------------------------------------------------------------


def test_a_norm_penalty_has_the_gradient_of_one_process():
    full = torch.arange(1.0, 61.0, dtype=torch.float64).view(5, 12)
    plain = nn.Parameter(full.clone())
    plain.norm().backward()

    def body(comm):
        param = one(comm, full)
        param.norm().backward()
        assert type(param.grad) is ShardedParameter
        torch.testing.assert_close(param.grad.full_tensor(), plain.grad, rtol=1e-12, atol=0)

    LocalWorld(2).run(body)
