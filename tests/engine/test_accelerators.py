# SPDX-License-Identifier: Apache-2.0
"""Devices that are neither CPUs nor CUDA: streams by their own module, or no offload."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from fullshard.core.errors import NotSupportedError
from fullshard.core.strategy import Offload
from fullshard.torch.comm.process_group import ProcessGroupComm
from fullshard.torch.comm.protocol import SoloComm
from fullshard.torch.comm.ranks import Ranks
from fullshard.torch.unit import streams
from fullshard.torch.unit.buffers import _with_index
from fullshard.torch.unit.plan import Plan
from fullshard.torch.unit.streams import CopyStream, EarlyStream, Lenders, has_streams

XPU, MPS = torch.device("xpu", 0), torch.device("mps")


class Stream(SimpleNamespace):
    __hash__ = object.__hash__


class Module:
    """Stands for torch.xpu: notes what its streams are told."""

    def __init__(self):
        self.told = []
        self.now = self.compute = self._stream("compute")

    def _stream(self, name):
        def record_event():
            self.told.append(f"{name} records")
            return SimpleNamespace(
                wait=lambda stream: self.told.append(f"{stream.name} waits for it"),
                synchronize=lambda: self.told.append("the host waits for it"),
            )

        return Stream(
            name=name,
            record_event=record_event,
            wait_stream=lambda other: self.told.append(f"{name} waits for {other.name}"),
            wait_event=lambda event: self.told.append(f"{name} waits for an event"),
        )

    def Stream(self, device):
        return self._stream("copies")

    def current_stream(self, device):
        return self.now

    @contextmanager
    def stream(self, chosen):
        before, self.now = self.now, chosen
        yield
        self.now = before


def test_copies_run_on_streams_of_the_devices_own_module(monkeypatch):
    module = Module()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(streams, "_streams", {})
    copies = CopyStream(XPU, "to the host")
    with copies.behind_compute():
        module.told.append(f"a copy on {module.now.name}")
    copies.join()
    copies.synchronize()
    assert module.told == [
        "copies waits for compute",
        "a copy on copies",
        "copies records",
        "compute waits for it",
        "the host waits for it",
    ]


def test_memory_goes_back_behind_whoever_has_used_it(monkeypatch):
    module = Module()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    lenders = Lenders(XPU)
    lenders.lend()
    lenders.follow()
    lenders.join()
    assert module.told == []  # one stream is in order by itself
    with module.stream(module.Stream(XPU)):
        lenders.join()
        lenders.follow()
    assert module.told == ["copies waits for compute", "compute waits for copies"]
    lenders.forget()
    lenders.follow()
    assert len(module.told) == 2


def test_models_do_not_share_the_stream_of_early_gathers(monkeypatch):
    """Else a thread could get the memory of another's model before it goes back in order."""
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    module = Module()
    chosen = []
    for early in (EarlyStream(XPU), EarlyStream(XPU)):
        early.begin()
        with early.beside_compute():
            chosen.append(module.now)
    assert chosen[0] is not chosen[1]


def test_offload_is_refused_where_a_device_has_no_streams():
    ranks = Ranks(SoloComm(), SoloComm(), SoloComm())
    assert has_streams(XPU)
    assert not has_streams(MPS)
    assert not has_streams(torch.device("cpu"))
    Plan(ranks, MPS)
    for offload in (Offload(params=True), Offload(optimizer=True)):
        with pytest.raises(NotSupportedError, match=r"torch\.mps has none; leave offload out"):
            Plan(ranks, MPS, offload=offload)
    assert Plan(ranks, XPU, offload=Offload(params=True)).pin


def test_what_lies_on_the_host_is_carried_by_the_groups_own_accelerator():
    def backend_of(device):
        if device.type != "xpu":
            raise RuntimeError("No backend type associated with device type cpu")
        return SimpleNamespace(name=lambda: "xccl")

    comm = ProcessGroupComm.__new__(ProcessGroupComm)
    comm._routes = {}
    comm.group = SimpleNamespace(_device_types=[XPU], _get_backend=backend_of)
    assert comm._route_of(torch.empty(1)).carrier == "xpu"


def test_extremes_go_by_rounds_in_host_memory_alone(monkeypatch):
    comm = ProcessGroupComm.__new__(ProcessGroupComm)
    ways = {"_extremes_by_rounds": "by rounds", "_start": "at once"}
    for name, way in ways.items():
        monkeypatch.setattr(comm, name, lambda *_, way=way, **__: way, raising=False)
    monkeypatch.setattr(comm, "_route_of", lambda _: SimpleNamespace(on_gloo=True), raising=False)
    assert comm.all_reduce([torch.empty(1)], "max") == "by rounds"
    assert comm.all_reduce([torch.empty(1, device="meta")], "max") == "at once"


def test_a_device_with_a_number_keeps_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert _with_index(torch.device("cuda", 3)) == torch.device("cuda", 3)
    assert _with_index(torch.device("cuda")) == torch.device("cuda", 0)
