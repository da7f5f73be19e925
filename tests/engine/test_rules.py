# SPDX-License-Identifier: Apache-2.0
"""Every operation that torch has is right on a sharded tensor or refused, tried one by one."""

import contextlib
import copy

import pytest
import torch
from support.threads import on_ranks
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from fullshard.core.errors import UnshardedOperationError
from fullshard.core.layout import Span
from fullshard.testing import LocalWorld
from fullshard.torch.tensor.ownership import Ownership
from fullshard.torch.tensor.parameter import ShardedParameter
from fullshard.torch.tensor.reductions import GlobalScalar


def sharded(full, comm, align=1):
    """This rank's part of ``full``, copied; spans are as equal as multiples of ``align`` can be."""
    each = -(-full.numel() // (comm.size * align)) * align
    ends = [min(rank * each, full.numel()) for rank in range(comm.size + 1)]
    spans = tuple(Span(ends[rank], ends[rank + 1]) for rank in range(comm.size))
    ownership = Ownership("p", tuple(full.shape), spans, comm)
    return ShardedParameter.value(ownership.cut(full).clone(), ownership)


def whole(result):
    """What a result means to the whole world, as plain tensors. Collective."""
    return tree_map(
        lambda x: x.full_tensor() if isinstance(x, (ShardedParameter, GlobalScalar)) else x, result
    )


# Crash, hang or touch the process when called with our made-up arguments, also on plain tensors.
DANGEROUS = {
    *("batch_norm", "native_", "rnn", "lstm", "gru_", "embedding", "cross_entropy", "ctc"),
    *("quantize", "choose_qparams", "pack", "unpool", "sparse", "empty"),
    *("data_ptr", "record_stream", "cudnn", "miopen", "mkldnn"),
}


def operations():
    """Every aten operation that writes to no ``out`` and draws nothing."""
    for qualified in sorted(torch._C._dispatch_get_all_op_names()):
        namespace, _, name = qualified.partition("::")
        packet, _, overload = name.partition(".")
        if namespace != "aten" or any(word in name for word in DANGEROUS):
            continue
        if packet.startswith("_") and not packet.startswith("_foreach_"):
            continue
        func = getattr(getattr(torch.ops.aten, packet), overload or "default", None)
        if func is not None and torch.Tag.nondeterministic_seeded not in func.tags:
            yield func


def made_up_arguments(func, tensor):
    """The required arguments of ``func``, with ``tensor`` for tensors; None if that cannot be."""
    by_type = {
        "Tensor": tensor,
        "List[Tensor]": [tensor, tensor],
        "number": 2,
        "float": 2.0,
        "int": 1,
        "bool": False,
        "List[int]": [1],
        "List[number]": [2, 3],
        "List[float]": [2.0, 3.0],
    }
    args = []
    for argument in func._schema.arguments:
        if argument.has_default_value():
            break
        kind = str(argument.type)
        if argument.kwarg_only or (kind not in by_type and not kind.startswith("Optional")):
            return None
        args.append(by_type.get(kind))
    has_tensor = any(arg is tensor or (isinstance(arg, list) and arg[0] is tensor) for arg in args)
    return args if has_tensor else None


def outcome(func, tensor):
    args = made_up_arguments(func, tensor)
    result = func(*args)
    return [*tree_flatten(whole(result))[0], *tree_flatten(whole(tensor))[0]]


def same(a, b):
    if not isinstance(b, Tensor):
        return a == b
    if not isinstance(a, Tensor) or (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return torch.allclose(a, b, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.filterwarnings("ignore")
def test_every_operation_is_right_or_refused():
    full = torch.linspace(0.25, 3.0, 60).view(5, 12)

    cases = []
    for func in operations():
        if made_up_arguments(func, full) is not None:
            # Otherwise not what it is meant for: plain tensors cannot do it either.
            with contextlib.suppress(Exception):
                cases.append((func, outcome(func, full.clone())))

    def body(comm):
        right, wrong = 0, {}
        for func, expected in cases:
            try:
                got = outcome(func, sharded(full, comm))
            except UnshardedOperationError:
                continue
            except Exception as error:
                wrong[str(func)] = repr(error)
                continue
            if len(got) == len(expected) and all(map(same, got, expected)):
                right += 1
            else:
                wrong[str(func)] = got
        assert not wrong
        return right

    (right,) = set(LocalWorld(3, eager=True).run(body))
    assert right > 450, "far fewer operations than torch 2.11 to 2.13 have: look at the test"


@on_ranks(2)
def test_extremes_over_all_dims_are_answered(comm):
    full = torch.linspace(0.25, 3.0, 60).view(5, 12)
    assert sharded(full, comm).amax().full_tensor() == 3.0
    assert sharded(full, comm).amin((0, 1)).full_tensor() == 0.25


@on_ranks(2)
def test_a_plain_scalar_takes_no_sharded_one(comm):
    scalar = sharded(torch.tensor(2.0), comm)
    with pytest.raises(UnshardedOperationError, match="full_tensor"):
        torch.tensor(0.0).copy_(scalar)


@on_ranks(3)
def test_foreach_with_a_number_first(comm):
    full = torch.linspace(-1.0, 2.0, 60).view(5, 12)
    got = torch._foreach_pow(2.0, [sharded(full, comm), sharded(full * 2, comm)])
    torch.testing.assert_close(whole(list(got)), [2.0**full, 2.0 ** (full * 2)])


def test_a_norm_can_be_kept_as_a_copy():
    norm = torch.tensor(2.0).as_subclass(GlobalScalar)
    kept, again = copy.deepcopy([norm, norm])
    assert kept is again
    assert isinstance(kept, GlobalScalar)
    norm += 1
    assert float(kept) == 2.0


@pytest.mark.parametrize("fill", [nn.init.trunc_normal_, nn.init.kaiming_uniform_])
@on_ranks(3)
def test_low_precision_is_drawn_as_in_one_process(comm, fill):
    def draw(tensor):
        return fill(tensor, generator=torch.Generator().manual_seed(3))

    expected = draw(torch.empty(17, 33, dtype=torch.bfloat16))
    got = draw(sharded(torch.zeros(17, 33, dtype=torch.bfloat16), comm, align=16))
    assert torch.equal(got.full_tensor(), expected)
