# SPDX-License-Identifier: Apache-2.0
"""Kernels of training alone on one device: what each reaches of the device's peak.

`all_kernels` yields rows: products in bfloat16, attention by backend, length and mask, what is
bound by memory (norms, rotations, gates, casts, losses), optimizers by parameter, copies to and
from the host, and the host's time for an operation. Each is the median over some repetitions by
the device's clock; ``s`` are seconds. A kernel that fails says so. Sizes on a CPU are tiny.
"""

import gc
import statistics
import time
from contextlib import nullcontext
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

HALF = torch.bfloat16
PRODUCTS = (  # output and input features of layers
    (1024, 1024),
    (3072, 1024),
    (2048, 2048),
    (8192, 2048),
    (512, 2048),
    (4096, 4096),
    (14336, 4096),
    (4096, 14336),
    (8192, 3072),
    (128256, 2048),
    (128256, 4096),
    (151936, 1024),
)
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def all_kernels(device, kinds):
    """Rows of ``kinds``."""
    for kind in kinds:
        for name, seconds, figures in guarded(kind, device):
            yield {"kind": kind.__name__, "name": name, "s": seconds, **figures}
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def guarded(kind, device):
    """The rows of a kind; a failure within one is told as a row."""
    for name, measure in kind(device, device.type == "cpu"):
        try:
            seconds, figures = measure()
            yield name, seconds, figures
        except Exception as error:
            yield name, None, {"failed": f"{type(error).__name__}: {error}"[:200]}


def timed(work, device, most_s=0.25):
    """Median seconds of ``work`` by the device's clock, of as many as take ``most_s``."""
    for _ in range(2):
        work()
    if device.type == "cpu":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    times = max(3, min(20, int(most_s / (time.perf_counter() - started))))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(first.elapsed_time(second) / 1e3 for first, second in pairwise(events))


# ---- kinds: each yields names and functions that give seconds and figures -----------------------


def host(device, tiny):
    """Microseconds of the host for one operation, the device being idle."""
    small = torch.ones(16, device=device, dtype=HALF)
    weight = torch.ones(16, 16, device=device, dtype=HALF, requires_grad=True)
    wide = torch.ones(16, 16, device=device, requires_grad=True)
    rows = torch.ones(4, 16, device=device, dtype=HALF)
    count = 20 if tiny else 500

    def each(work, after=lambda: None):
        for _ in range(20):
            work()
        settle(device)
        started = time.perf_counter()
        for _ in range(count):
            work()
        issued = (time.perf_counter() - started) / count
        settle(device)
        after()
        return issued, {"whole_s": (time.perf_counter() - started) / count}

    def cast():
        with torch.autocast(device.type, HALF):
            return F.linear(rows, wide)

    def both():
        F.linear(rows, weight).sum().backward()

    def chain():
        value = weight
        for _ in range(100):
            value = value * 1.0
        settle(device)
        started = time.perf_counter()
        value.sum().backward()
        return (time.perf_counter() - started) / 100, {}

    yield "add", lambda: each(lambda: small + 1)
    yield "linear", lambda: each(lambda: F.linear(rows, weight.detach()))
    yield "linear with graph", lambda: each(lambda: F.linear(rows, weight))
    yield "linear under autocast", lambda: each(cast)
    yield "linear, sum and backward", lambda: each(both)
    yield "one of 100 products in backward", chain
    yield "item", lambda: each(lambda: small[0].item())


def settle(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def products(device, tiny):
    """Products of a linear layer: forward, and both of backward together."""
    for out, features in PRODUCTS[:1] if tiny else PRODUCTS:
        for tokens in (64,) if tiny else (512, 2048, 8192, 16384):
            yield f"{tokens}x{out}x{features}", partial(product, device, tokens, out, features)


def product(device, tokens, out, features):
    x = torch.randn(tokens, features, device=device, dtype=HALF)
    w = torch.randn(out, features, device=device, dtype=HALF)
    grad = torch.randn(tokens, out, device=device, dtype=HALF)
    flops = 2 * tokens * out * features
    forward = timed(lambda: F.linear(x, w), device, 0.03)
    data = timed(lambda: grad @ w, device, 0.03)
    weights = timed(lambda: grad.t() @ x, device, 0.03)
    return forward, {
        "tflops": flops / forward / 1e12,
        "to_input_tflops": flops / data / 1e12,
        "to_weight_tflops": flops / weights / 1e12,
    }


def attention(device, tiny):
    """Causal attention of 16,384 tokens in samples of a length, 32 heads."""
    lengths = (128,) if tiny else (1024, 4096, 16384, 65536)
    for length in lengths:
        for head in (64, 128):
            for backend in BACKENDS:
                if length > {"math": 4096, "efficient": 16384}.get(backend, length):
                    continue
                yield (
                    f"{backend} length {length} head {head}",
                    partial(attended, device, backend, length, head, False),
                )
    for backend in ("efficient", "cudnn", "math"):
        yield (
            f"{backend} length {lengths[min(1, len(lengths) - 1)]} head 128 masked",
            partial(attended, device, backend, lengths[min(1, len(lengths) - 1)], 128, True),
        )
    for length in lengths[1:3]:
        for backend in ("flash", "cudnn"):
            yield (
                f"{backend} length {length} head 96",
                partial(attended, device, backend, length, 96, False),
            )
    yield (
        "any length 4096 head 128",
        partial(attended, device, None, lengths[min(1, len(lengths) - 1)], 128, False),
    )


def attended(device, backend, length, head, masked):
    tokens = length if device.type == "cpu" else max(length, 16384)
    batch, heads = tokens // length, 32
    shape = (batch, length, heads, head)
    q, k, v = (
        torch.randn(shape, device=device, dtype=HALF).transpose(1, 2).requires_grad_()
        for _ in range(3)
    )
    mask = None
    if masked:
        mask = torch.ones(length, length, device=device, dtype=torch.bool).tril()
        mask = mask.expand(batch, 1, length, length)

    def forward():
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=not masked)

    with nullcontext() if backend is None else sdpa_kernel(BACKENDS[backend]):
        output = forward()
        grad = torch.randn_like(output)
        ahead = timed(forward, device)
        back = timed(
            lambda: torch.autograd.grad(output, (q, k, v), grad, retain_graph=True), device
        )
    flops = 4 * tokens * length * heads * head / 2
    return ahead, {
        "backward_s": back,
        "tflops": flops / ahead / 1e12,
        "backward_tflops": 2.5 * flops / back / 1e12,
    }


def elementwise(device, tiny):
    """Time what memory bounds; bytes/s count each input read once, each output written once."""
    tokens, width = (64, 64) if tiny else (16384, 4096)
    x = torch.randn(tokens, width, device=device, dtype=HALF, requires_grad=True)
    y = torch.randn(tokens, width, device=device, dtype=HALF, requires_grad=True)
    wide = torch.randn(tokens, width, device=device)
    weight = torch.ones(width, device=device, dtype=HALF, requires_grad=True)
    heads = x.detach().view(1, tokens, width // 16, 16).transpose(1, 2).requires_grad_()
    cos = torch.randn(1, 1, tokens, 16, device=device, dtype=HALF)

    def norm():
        value = x.float()
        value = value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + 1e-6)
        return weight * value.to(HALF)

    def turned():
        half = torch.cat((-heads[..., 8:], heads[..., :8]), -1)
        return heads * cos + half * cos

    works = {
        "add": lambda: x + y,
        "multiply": lambda: x * y,
        "silu times": lambda: F.silu(x) * y,
        "gelu": lambda: F.gelu(x),
        "norm of transformers": norm,
        "rms_norm": lambda: F.rms_norm(x, (width,), weight, 1e-6),
        "layer_norm": lambda: F.layer_norm(x, (width,), weight, None, 1e-6),
        "rotation of transformers": turned,
        "to float32": lambda: x.float(),
    }
    for name, work in works.items():
        yield name, partial(passed, work, device, tokens * width)
    yield (
        "to bfloat16",
        lambda: (
            (spent := timed(lambda: wide.to(HALF), device)),
            {"gb_s": tokens * width * 6 / spent / 1e9},
        ),
    )
    target = torch.empty_like(wide)
    yield (
        "copy",
        lambda: (
            (spent := timed(lambda: target.copy_(wide), device)),
            {"gb_s": tokens * width * 8 / spent / 1e9},
        ),
    )


def passed(work, device, numel):
    output = work()
    grad = torch.randn_like(output)
    inputs = leaves(output)
    ahead = timed(work, device, 0.1)
    back = timed(lambda: torch.autograd.grad(output, inputs, grad, retain_graph=True), device, 0.1)
    return ahead, {
        "backward_s": back,
        "bytes_an_element_at_3tb_s": ahead * 3e12 / numel,
        "backward_bytes_an_element_at_3tb_s": back * 3e12 / numel,
    }


def leaves(output):
    found, left = [], [output.grad_fn]
    while left:
        node = left.pop()
        if node is None:
            continue
        variable = getattr(node, "variable", None)
        if variable is not None and not any(variable is each for each in found):
            found.append(variable)
        left += [each[0] for each in node.next_functions]
    return found


def losses(device, tiny):
    """Cross-entropy of logits, forward and backward, as transformers has it and of 16 bits."""
    tokens = 64 if tiny else 8192
    for vocab in (512,) if tiny else (32000, 128256, 151936):
        for kind in ("transformers", "native", "float32"):
            yield f"{kind} {tokens}x{vocab}", partial(lost, device, tokens, vocab, kind)


def lost(device, tokens, vocab, kind):
    dtype = torch.float32 if kind == "float32" else HALF
    logits = torch.randn(tokens, vocab, device=device, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, vocab, (tokens,), device=device)

    def forward():
        return F.cross_entropy(logits.float() if kind == "transformers" else logits, labels)

    loss = forward()
    ahead = timed(forward, device, 0.1)
    back = timed(lambda: torch.autograd.grad(loss, logits, retain_graph=True), device, 0.1)
    scale = 3e12 / tokens / vocab
    return ahead, {
        "backward_s": back,
        "bytes_a_logit_at_3tb_s": ahead * scale,
        "backward_bytes_a_logit_at_3tb_s": back * scale,
    }


def optimizers(device, tiny):
    """A step over 1e9 parameters: the bytes that it is worth at 3 TB/s, by parameter."""
    count, width = (2, 16) if tiny else (256, 2048)
    for dtype in (HALF, torch.float32):
        for way in ("fused", "foreach", "loop"):
            yield f"AdamW {way} {dtype}", partial(stepped, device, count, width, dtype, way)
    yield "clip", partial(clipped, device, count, width)
    yield from host_optimizers(device, tiny)


def host_optimizers(device, tiny):
    """The same over 1e8 parameters in the host's memory."""
    count, width, cpu = 2 if tiny else 25, 16 if tiny else 2048, torch.device("cpu")
    for dtype in (torch.float32, HALF):
        for way in ("fused", "foreach", "loop"):
            yield (
                f"AdamW on the host {way} {dtype}",
                partial(stepped, cpu, count, width, dtype, way),
            )


def filled(device, count, width, dtype):
    params = []
    for _ in range(count):
        param = torch.randn(width, width, device=device, dtype=dtype, requires_grad=True)
        param.grad = torch.randn_like(param)
        params.append(param)
    return params


def stepped(device, count, width, dtype, way):
    params = filled(device, count, width, dtype)
    ways = {"fused": {"fused": True}, "foreach": {"foreach": True}}
    adamw = torch.optim.AdamW(params, **ways.get(way, {"foreach": False, "fused": False}))
    spent = timed(adamw.step, device, 0.3)
    numel = count * width * width
    return spent, {"bytes_a_parameter_at_3tb_s": spent * 3e12 / numel, "numel": numel}


def clipped(device, count, width):
    params = filled(device, count, width, HALF)
    spent = timed(lambda: torch.nn.utils.clip_grad_norm_(params, 1.0), device)
    return spent, {"bytes_a_parameter_at_3tb_s": spent * 3e12 / (count * width * width)}


def copies(device, tiny):
    """Between the device and pinned or pageable memory of the host."""
    numel = 2**10 if tiny else 2**28
    for pinned in (True, False):
        for way in ("to the device", "to the host"):
            yield (
                f"{'pinned' if pinned else 'pageable'} {way}",
                partial(copied, device, numel, pinned, way),
            )


def copied(device, numel, pinned, way):
    near = torch.zeros(numel, device=device)
    far = torch.zeros(numel, pin_memory=pinned and device.type == "cuda")
    target, source = (near, far) if "device" in way else (far, near)
    spent = timed(lambda: target.copy_(source, non_blocking=True), device, 0.3)
    return spent, {"gb_s": numel * 4 / spent / 1e9}


KINDS = (host, attention, products, elementwise, losses, optimizers, copies)
"""All kinds of rows, the most telling first."""
