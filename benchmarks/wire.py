# SPDX-License-Identifier: Apache-2.0
"""What stands for the other ranks and the wire to them, when one process is all there is.

Engines call torch.distributed as always, on a fake process group. Its collectives copy for each
rank, on the stream that called them: more than a real one writes, and with 1,024 ranks longer than
everything else takes. So they are replaced, for all engines.
"""

from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist


class Sent:
    """A collective under way: as with NCCL, `wait` puts the current stream behind it."""

    def __init__(self, stream=None):
        self._event = None if stream is None else stream.record_event()

    def wait(self, timeout=None):
        if self._event is not None:
            self._event.wait()
        return True

    def is_completed(self):
        return self._event is None or self._event.query()


class Wire:
    """What process groups do while `patched`: what every rank gives is what this one gives.

    Without ``fills``, gathers leave their outputs as they are.
    """

    def __init__(self):
        self.fills = True
        self._streams = {}

    def gather(self, group, output, given, opts=None):
        parts, rank = output.detach().view(group.size(), -1), group.rank()
        others = [parts[:rank], parts[rank + 1 :]] if self.fills else []
        if parts[rank].data_ptr() != given.data_ptr() and self.fills:
            others.append(parts[rank])
        return self._write(group, others, given.detach(), opts)

    def reduce(self, group, output, given, opts=None):
        start = group.rank() * output.numel()
        mine = given.detach()[start : start + output.numel()]
        return self._write(group, [output.detach()], mine, opts)

    def _write(self, group, outputs, value, opts):
        if not outputs or not value.is_cuda:
            for output in outputs:
                output.copy_(value)
            return Sent()
        # Asynchronous collectives run on the communicator's stream, others on the current one.
        stream = torch.cuda.current_stream()
        if opts is None or opts.asyncOp:
            before, name = stream, group.group_name
            stream = self._streams.setdefault(name, torch.cuda.Stream())
            stream.wait_stream(before)
        with torch.cuda.stream(stream):
            for output in outputs:
                output.copy_(value)
        return Sent(stream)

    def patched(self):
        """Within, process groups do this."""

        def gather(group, output, given, opts=None):
            return self.gather(group, output, given, opts)

        def reduce(group, output, given, opts=None):
            return self.reduce(group, output, given, opts)

        return replaced(gather, reduce)


class Silence:
    """What process groups do while `patched`, where only the host counts: nothing at all."""

    def patched(self):
        """Within, process groups do this."""
        nothing = Sent()
        return replaced(*[lambda group, output, given, opts=None: nothing] * 2)


@contextmanager
def replaced(gather, reduce):
    """Within, process groups gather and reduce so."""
    # torch 2.13 renamed them; what there is of them is replaced.
    calls = {"_allgather_base": gather, "all_gather_single": gather}
    calls |= {"_reduce_scatter_base": reduce, "reduce_scatter_single": reduce}
    together = [(("all_gather_single", "allgather_into_tensor"), gather)]
    together += [(("reduce_scatter_single", "reduce_scatter_tensor"), reduce)]
    calls |= {f"{name}_coalesced": _one_by_one(call) for names, call in together for name in names}
    there = {name: call for name, call in calls.items() if hasattr(dist.ProcessGroup, name)}
    with mock.patch.multiple(dist.ProcessGroup, **there):
        yield


def _one_by_one(call):
    def calls(group, outputs, inputs, opts=None):
        return [call(group, *pair, opts) for pair in zip(outputs, inputs, strict=True)][-1]

    return calls


class PooledAllGather:
    """FSDP2's all-gather into memory of a pool. See the first lines of this file."""

    def __init__(self):
        self._pool = torch.cuda.MemPool()

    def allocate(self, size, *, dtype, device):
        with torch.cuda.use_mem_pool(self._pool):
            return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return call(output_tensor, input_tensor, group=group, async_op=async_op)
