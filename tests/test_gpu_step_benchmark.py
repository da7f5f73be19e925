# SPDX-License-Identifier: Apache-2.0
"""The logic of benchmarks/gpu_step.py and offload_step.py, on a CPU: results, and the wire."""

import importlib
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fullshard.torch.comm.process_group import ProcessGroupComm

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
TINY = ["--device=cpu", "--tokens=8", "--width=32", "--heads=2", "--layers=2"]
TINY += ["--rounds=1", "--steps=1"]


@pytest.fixture
def gpu_step(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu_step")


@pytest.fixture
def fake_world():
    def begin(size):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)

    assert not dist.is_initialized()
    yield begin
    dist.destroy_process_group()


def test_without_a_gpu_it_says_so(gpu_step, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        gpu_step.main([])
    assert ended.value.code == 2
    assert "no GPU" in capsys.readouterr().err


def test_what_the_wire_carries(gpu_step, fake_world):
    fake_world(3)
    comm, wire = ProcessGroupComm(dist.group.WORLD), gpu_step.Wire()
    mine, whole = torch.ones(2), torch.arange(6.0)
    full, in_place, slice_of_it = torch.zeros(6), torch.tensor([7.0] + 5 * [0.0]), torch.zeros(2)
    with wire.patched():
        comm.all_gather([(full, mine)]).wait()
        comm.all_gather([(in_place, in_place[:2])]).wait()
        comm.reduce_scatter([(slice_of_it, whole)]).wait()
        assert full.tolist() == [1.0] * 6
        assert in_place.tolist() == [7.0, 0.0] * 3
        assert slice_of_it.tolist() == [0.0, 1.0]
        wire.fills = False
        full.zero_()
        comm.all_gather([(full, mine)]).wait()
        assert full.tolist() == [0.0] * 6
    comm.all_gather([(full, mine)]).wait()  # the fake group's own again
    assert full.tolist() == [1.0] * 6


@pytest.mark.parametrize(
    ("name", "copies"),
    [
        ("Memcpy DtoD (Device -> Device)", True),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda", True),
        ("void at::native::vectorized_elementwise_kernel<4, bfloat16_copy_kernel_cuda(", True),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy_aligned16_contig<", True),
        ("void at::native::split_with_sizes_copy_out_contiguous_no_cast_kernel(", True),
        ("void at::native::detail::chunk_cat_cuda_kernel<float, c10::BFloat16>(", True),
        ("void multi_tensor_apply_kernel<TensorListMetadata<2>, CopyFunctor<float,", True),
        ("Memcpy HtoD (Pageable -> Device)", False),
        ("Memset (Device)", False),
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NTT", False),
        ("void at::native::vectorized_elementwise_kernel<4, silu_kernel(", False),
    ],
)
def test_which_kernels_copy(gpu_step, name, copies):
    assert gpu_step.is_copy(name, "cuda") == copies


def test_masters_are_what_adamw_trains(gpu_step):
    model = torch.nn.Linear(4, 4, bias=False).bfloat16()
    exact = model.weight.detach().float().requires_grad_()
    running = gpu_step.Running(model, gpu_step.Masters(model.parameters()))
    optimizer = gpu_step.adamw([exact])
    x = torch.eye(4, dtype=torch.bfloat16)
    for _ in range(3):  # their sum is visible in bf16 though a step may be too small for it
        running.step((x,), torch.ones_like(x))
        exact.grad = torch.ones_like(exact)
        optimizer.step()
    assert torch.equal(model.weight, exact.bfloat16())


# The compiler warns of its own.
@pytest.mark.long
@pytest.mark.filterwarnings("default")
def test_engines_compute_the_same(gpu_step, fake_world):
    fake_world(1)
    options = gpu_step.parsed([*TINY, "--backend", "eager"])
    inputs, grad = gpu_step.make_inputs(8, options)
    with gpu_step.Wire().patched():
        outputs = {}
        for name, make in gpu_step.ENGINES.items():
            running = make(options, 1)
            for _ in range(3):
                outputs[name] = running.step(inputs, grad).detach()
    for output in outputs.values():
        torch.testing.assert_close(output, outputs[gpu_step.PLAIN], rtol=0.02, atol=0.02)
    first = gpu_step.build(options, torch.bfloat16)(*inputs)
    assert not torch.allclose(first, outputs[gpu_step.PLAIN], rtol=0.02, atol=0.02)


@pytest.mark.long
@pytest.mark.filterwarnings("default")
def test_rows(gpu_step, fake_world):
    fake_world(4)
    left_out = gpu_step.COMPILED
    rows = gpu_step.measure(4, gpu_step.parsed([*TINY, "--backend", "none"]))
    assert [row["engine"] for row in rows] == [
        name for name in gpu_step.ENGINES if name != left_out
    ]
    by_name = {row["engine"]: row for row in rows}
    assert all(row["finite"] == "True" and row["step_s"] > 0 for row in rows)
    assert by_name[gpu_step.PLAIN]["time_of_plain"] == by_name[gpu_step.PEER]["time_of_fsdp2"] == 1
    copies = {name: row.get("copies_per_unit") for name, row in by_name.items()}
    assert copies[gpu_step.PLAIN] is None
    assert 0 < copies[gpu_step.OURS] < copies[gpu_step.PEER]
    gpu_step.printed(rows)


def test_ways_to_step_offloaded_are_told_beside_their_bound(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    offload_step = importlib.import_module("offload_step")
    shape = ["--shapes", "2,8,2", "4,8,1", "--width", "64", "--heads", "4"]
    tries = ["--device", "cpu", "--rounds", "1", "--steps", "1", "--out", str(tmp_path / "o.json")]
    offload_step.main([*shape, *tries])
    rows = json.loads((tmp_path / "o.json").read_text())["rows"]
    assert [row["step"] for row in rows] == 2 * list(offload_step.WAYS)
    assert {(row["world"], row["tokens"], row["layers"]) for row in rows} == {(2, 8, 2), (4, 8, 1)}
    for row in rows:
        assert row["of_bound"] == row["step_s"] / max(row["updates_s"], row["copies_s"])
