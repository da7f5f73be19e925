# SPDX-License-Identifier: Apache-2.0
"""`torch.cuda`'s streams and events, on a simulated device."""

import itertools
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import torch

from device.machine import COMPUTE, HOST


class Streams:
    """The names of `torch.cuda` that stand for ``machine``."""

    def __init__(self, machine):
        self.machine = machine
        numbers = itertools.count(1)
        device = torch.device("cuda", 0)

        class Stream:
            def __init__(self, device=None, priority=0, name=None, **_):
                self.name = name or f"stream {next(numbers)}"
                self.priority = priority
                self.device = torch.device("cuda", 0)
                machine.clock(self.name)

            def __eq__(self, other):
                return isinstance(other, Stream) and self.name == other.name

            def __hash__(self):
                return hash(self.name)

            def wait_stream(self, other):
                machine.put_behind(self.name, machine.position(other.name))

            def wait_event(self, event):
                event.wait(self)

            def record_event(self, event=None):
                event = event or Event()
                event.record(self)
                return event

            def synchronize(self):
                machine.sync(machine.position(self.name), "stream.synchronize")

            def query(self):
                return machine.ask(machine.position(self.name))

        class Event:
            def __init__(self, **_):
                self.position = {}

            def record(self, stream=None):
                self.position = machine.position(stream.name if stream else machine.current)
                return self

            def wait(self, stream=None):
                machine.put_behind(stream.name if stream else machine.current, self.position)

            def synchronize(self):
                machine.sync(self.position, "event.synchronize")

            def query(self):
                return machine.ask(self.position)

            def elapsed_time(self, other):
                return 1.0

        def current_stream(device=None):
            return Stream(name=machine.current)

        @contextmanager
        def stream(chosen):
            before, machine.current = machine.current, chosen.name if chosen else machine.current
            try:
                yield
            finally:
                machine.current = before

        def set_stream(chosen):
            machine.current = chosen.name

        def synchronize(device=None):
            for name in list(machine.clocks):
                if name != HOST:
                    machine.put_behind(HOST, machine.position(name))
            machine.sync({}, "torch.cuda.synchronize")

        self.names = {
            "Stream": Stream,
            "Event": Event,
            "current_stream": current_stream,
            "default_stream": lambda device=None: Stream(name=COMPUTE),
            "stream": stream,
            "set_stream": set_stream,
            "synchronize": synchronize,
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "current_device": lambda: 0,
            "device_count": lambda: 1,
            "set_device": lambda device: None,
            "device": lambda device: nullcontext(),
            "_lazy_init": lambda: None,
            "MemPool": lambda allocator=None: SimpleNamespace(),
            "use_mem_pool": lambda pool, device=None: nullcontext(),
            "is_current_stream_capturing": lambda: False,
            "mem_get_info": lambda device=None: (2**36, 2**37),
            "memory_allocated": lambda device=None: 0,
            "memory_reserved": lambda device=None: 0,
            "max_memory_allocated": lambda device=None: 0,
            "get_device_capability": lambda device=None: (9, 0),
        }
        self.device = device
