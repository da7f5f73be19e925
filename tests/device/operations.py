# SPDX-License-Identifier: Apache-2.0
"""The reads and writes of torch's operations, seen between autograd and fake tensors."""

import functools
import weakref

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from device.machine import HOST, Memory

aten = torch.ops.aten

# Operations that write what they are given without reading it first.
_OVERWRITE = {
    *("copy_", "zero_", "fill_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"),
    *("_foreach_copy_", "_foreach_zero_", "trunc_normal_"),
}
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_SHAPE_ONLY = (
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
    "new_zeros",
    "new_ones",
)
_COPIES = {aten.copy_.default, aten._to_copy.default, aten._foreach_copy_.default}


def is_on_device(tensor):
    """Return ``tensor.is_cuda``, for which a fake tensor would ask every mode of dispatch."""
    device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
    return device.type == "cuda"


class Memories:
    """The memory of each storage."""

    def __init__(self, machine):
        self._machine = machine
        self._of = {}
        self.watched = True

    def of(self, tensor, *, new=None):
        """The memory of a fake tensor; ``new`` says whether it has just been allocated."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        memory = self._of.get(key)
        if memory is None:
            home = self._machine.current if is_on_device(tensor) else HOST
            label = f"{tuple(tensor.shape)} {tensor.dtype}"
            if new is None:
                memory = Memory(storage.nbytes(), home, label, known=True)
            else:
                pinned = new == "pinned"
                memory = self._machine.allocate(storage.nbytes(), home, label, pinned=pinned)
            self._of[key] = memory
            # torch keeps the Python object of a storage as long as the storage lives.
            weakref.finalize(storage, self._died, key).atexit = False
        return memory

    def knows(self, tensor):
        return tensor.untyped_storage()._cdata in self._of

    def touch(self, tensor, write, timeline, what, *, again=False):
        if isinstance(tensor, FakeTensor) and tensor.numel():
            memory = self.of(tensor)
            self._machine.touch(memory, _span(tensor), write, timeline, what, again=again)

    def bytes_beyond(self, tensors):
        """Return the bytes that the device holds beside the memories of ``tensors``."""
        plain = (getattr(t, "local", getattr(t, "_local_tensor", t)) for t in tensors)
        of = [self.of(t) for t in plain if isinstance(t, FakeTensor) and is_on_device(t)]
        return self._machine.held.total_bytes - sum({id(m): m.size for m in of}.values())

    def derive(self, reads, writes):
        """The versions of weights that ``writes`` are made of are those of ``reads``."""
        read, written = (
            [(self.of(t), _span(t)) for t in tensors if isinstance(t, FakeTensor) and t.numel()]
            for tensors in (reads, writes)
        )
        self._machine.derive(read, written)

    def check_fresh(self, unit):
        """Find full parameters that are not made of the shards as they are now."""
        for sharded, full in zip(unit.sharded, unit.full.params, strict=True):
            shard, full = sharded.local, full.data
            if isinstance(full, FakeTensor) and shard.numel():
                wanted = self.of(shard).version(_span(shard))
                if self.of(full).version(_span(full), min) < wanted:
                    self._machine.find(f"{sharded.ownership.name} is used as it was before a step")

    def resize(self, storage, size):
        """A storage gets memory, or gives it back."""
        memory = self._of.get(storage._cdata)
        if memory is None:
            return
        if not memory.gone:
            self._machine.free(memory)
        new = Memory(0, memory.home, memory.label, memory.pinned, gone=True)
        if size:
            home = HOST if memory.home == HOST else self._machine.current
            new = self._machine.allocate(size, home, memory.label, pinned=memory.pinned)
        new.weights = memory.weights
        self._of[storage._cdata] = new

    def _died(self, key):
        memory = self._of.pop(key, None)
        if memory is not None and not memory.gone:
            self._machine.free(memory)


class Operations(TorchDispatchMode):
    """Runs every operation on fake tensors, and tells the machine."""

    def __init__(self, machine, memories):
        super().__init__()
        self.machine, self.memories = machine, memories

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # nothing is compiled here, and to tell dynamo so takes time in each operation

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked more often than everything else together
        if any(not issubclass(FakeTensor, kind) for kind in types):
            return NotImplemented  # a subclass around tensors: it comes back with those
        if func in (aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default):
            return self._answer(func, args)
        if func is aten.is_pinned.default:
            return self.memories.of(args[0]).pinned
        if _is_composite(func):
            with self:  # what it is made of
                return func.decompose(*args, **kwargs)
        pin = bool(kwargs.get("pin_memory"))
        if pin:
            kwargs = {**kwargs, "pin_memory": False}
        if not self.memories.watched:
            return func(*args, **kwargs)
        reads, writes = _operands(func, args, kwargs)
        result = func(*args, **kwargs)
        outputs = [t for t in tree_iter(result) if isinstance(t, FakeTensor)]
        for tensor in outputs:
            tensor.constant = None  # torch would compute with its value, on a device that is not
        fresh = [t for t in outputs if not _shares(t, (*reads, *writes))]
        if not writes and not fresh:
            return result  # a view, or nothing
        if any(t.fake_device.type == "meta" for t in (*reads, *writes, *fresh)):
            return result  # somebody works out a shape
        self._carry_out(func, args, kwargs, reads, (writes, fresh), pin)
        return result

    def _carry_out(self, func, args, kwargs, reads, results, pin):
        writes, fresh = results
        machine, name = self.machine, func.overloadpacket.__name__
        on_device = any(is_on_device(t) for t in (*reads, *writes, *fresh))
        pins = pin or (name == "_to_copy" and kwargs.get("non_blocking") and on_device)
        for tensor in fresh:
            self.memories.of(tensor, new="pinned" if pins and not is_on_device(tensor) else "")
        if name in _EMPTY:
            return
        timeline = machine.current if on_device else machine.host
        ends = {is_on_device(t) for t in (*reads, *writes, *fresh)}
        crosses = func in _COPIES and len(ends) == 2
        machine.step(timeline)
        host_reads = []
        for tensor in reads:
            if any(tensor is each for each in writes):
                continue  # changed in place
            if crosses and not is_on_device(tensor) and not self.memories.of(tensor).pinned:
                host_reads.append(tensor)  # staged before the call returns
            else:
                self.memories.touch(tensor, False, timeline, name)
        for tensor in (*writes, *fresh):
            again = any(tensor is each for each in reads)
            self.memories.touch(tensor, True, timeline, name, again=again)
        if crosses:
            machine.cross(timeline, to_host=not is_on_device((*writes, *fresh)[0]))
        if name in ("full", "fill_"):
            self.memories.of((*writes, *fresh)[0]).numbers.append(repr(args[1]))
        if host_reads:
            machine.step(machine.host)
            for tensor in host_reads:
                self.memories.touch(tensor, False, machine.host, name)
        self.memories.derive(reads, (*writes, *fresh))
        sizes = [t.numel() * t.element_size() for t in (*reads, *writes, *fresh)]
        flops = 0
        if func.overloadpacket in flop_registry:
            out = fresh[0] if fresh else writes[0]
            flops = flop_registry[func.overloadpacket](*args, **kwargs, out_val=out)
        machine.launch(timeline, name, sum(sizes), flops, crosses=crosses)
        if crosses and not self._is_asynchronous(func, args, kwargs, (*writes, *fresh)):
            machine.sync(machine.position(timeline), f"a blocking {name}")

    def _is_asynchronous(self, func, args, kwargs, written):
        names = [argument.name for argument in func._schema.arguments]
        place = names.index("non_blocking")
        given = args[place] if place < len(args) else kwargs.get("non_blocking", False)
        if not given:
            return False
        return all(is_on_device(t) or self.memories.of(t).pinned for t in written)

    def _answer(self, func, args):
        """Values that nobody has: ones, and equality."""
        tensors = [t for t in args if isinstance(t, FakeTensor)]
        if not tensors:
            return func(*args)
        on_device = any(is_on_device(t) for t in tensors)
        timeline = self.machine.current if on_device else self.machine.host
        name = func.overloadpacket.__name__
        self.machine.step(timeline)
        for tensor in tensors:
            self.memories.touch(tensor, False, timeline, name)
        if on_device:
            self.machine.sync(self.machine.position(timeline), name)
        if func is not aten._local_scalar_dense.default:
            return True
        dtype = tensors[0].dtype
        if dtype == torch.bool:
            return False
        # No overflow has been found; a counter of steps on the host stands at one.
        return float(not on_device) if dtype.is_floating_point else 1


def _operands(func, args, kwargs):
    reads, writes = [], []
    if func.overloadpacket.__name__ == "all_gather_copy_in":  # FSDP2's does not say that it writes
        return list(args[0]), [args[1]]
    for number, (name, read, written) in enumerate(_uses(func)):
        value = args[number] if number < len(args) else kwargs.get(name)
        if isinstance(value, list | tuple):
            tensors = [t for t in tree_iter(value) if isinstance(t, FakeTensor)]
        else:
            tensors = [value] if isinstance(value, FakeTensor) else ()
        if written:
            writes += tensors
        if read:
            reads += tensors
    return reads, writes


@functools.cache
def _is_composite(func):
    """True if torch makes it of others, which it does here only above autograd."""
    return func._can_decompose()


@functools.cache
def _uses(func):
    """For each argument its name, and whether an operation reads and writes it."""
    name = func.overloadpacket.__name__
    if name in _EMPTY or name in _SHAPE_ONLY:
        return ()
    uses = []
    for argument in func._schema.arguments:
        written = argument.alias_info is not None and argument.alias_info.is_write
        read = not written or not (name in _OVERWRITE or argument.is_out)
        uses.append((argument.name, read, written))
    return uses


def _shares(tensor, others):
    key = tensor.untyped_storage()._cdata
    return any(other.untyped_storage()._cdata == key for other in others)


def _span(tensor):
    begin = tensor.storage_offset() * tensor.element_size()
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    numel = 1 + sum((size - 1) * stride for size, stride in strides)
    return begin, begin + numel * tensor.element_size()
