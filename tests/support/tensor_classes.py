# SPDX-License-Identifier: Apache-2.0
"""Tensors of classes that decide themselves what travels, by FSDP2's protocol."""

import torch


class Halved(torch.Tensor):
    """Rests in fp32 and travels as fp16, by FSDP2's protocol for tensor classes."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, shape, stride):
        return Halved(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        assert func is torch.ops.aten.detach.default, func
        return type(args[0])(args[0].inner)

    def fsdp_pre_all_gather(self, mesh):
        return (self.inner.half(),), "a note"

    def fsdp_post_all_gather(self, outputs, notes, dtype, *, out=None):
        assert notes == "a note"
        if out is not None:
            out.data.copy_(outputs[0])
            return None
        made = outputs[0].to(dtype)
        return made, (made,)


class Rows8(torch.Tensor):
    """Numbers in 8 bits, with one scale a row: two inner tensors."""

    @staticmethod
    def __new__(cls, codes, scale, dtype):
        return torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, device=codes.device, dtype=dtype
        )

    def __init__(self, codes, scale, dtype):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], (self.dtype,)

    @classmethod
    def __tensor_unflatten__(cls, parts, context, size, stride):
        assert isinstance(context, tuple)
        return cls(parts["codes"], parts["scale"], *context)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("detach", "clone", "_to_copy"):
            kwargs = {k: v for k, v in (kwargs or {}).items() if k != "dtype"}
            return cls(func(args[0].codes, **kwargs), func(args[0].scale, **kwargs), args[0].dtype)
        raise NotImplementedError(func)

    @classmethod
    def rounded(cls, value):
        scale = value.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        return cls((value / scale).round().to(torch.int8), scale, value.dtype)

    def value(self):
        return self.codes * self.scale
