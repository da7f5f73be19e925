# SPDX-License-Identifier: Apache-2.0
"""The two doors as their users meet them: names, printing, state dicts, refusals."""

import contextlib
import inspect
import io
import os

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from support.models import make, seeded
from support.threads import on_ranks
from support.training import shard
from support.world import on_processes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard.core.errors import ConfigurationError, NotSupportedError, UsageError
from fullshard.testing import LocalWorld
from fullshard.torch import (
    BackwardPrefetch,
    CPUOffload,
    FSDPModule,
    MixedPrecision,
    ShardedParameter,
    ShardingStrategy,
    fully_shard,
    save_full_weights,
)
from fullshard.torch import DataParallelMeshDims as Dims
from fullshard.torch import FullyShardedDataParallel as FSDP
from fullshard.torch.step.managed import managed_unit_of
from fullshard.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy


def test_signatures_are_those_of_torch():
    doors = {FSDP: torch_fsdp.FullyShardedDataParallel, fully_shard: torch_fsdp.fully_shard}
    for ours, theirs in doors.items():
        ours, theirs = (inspect.signature(each).parameters for each in (ours, theirs))
        assert set(theirs) - {"dp_mesh_dims"} <= set(ours)  # dp_mesh_dims is new in torch 2.13
        shared = [name for name in ours if name in theirs]
        assert shared == [name for name in theirs if name in ours]
        for name in shared:
            assert ours[name].kind == theirs[name].kind
            default, expected = ours[name].default, theirs[name].default
            assert str(default).rsplit(".", 1)[-1] == str(expected).rsplit(".", 1)[-1] or (
                type(default).__name__ == type(expected).__name__
            ), name
    assert FSDP.ShardingStrategy.FULL_SHARD is ShardingStrategy.FULL_SHARD
    assert FSDP.BackwardPrefetch.BACKWARD_PRE is BackwardPrefetch.BACKWARD_PRE
    assert FSDP.CPUOffload is CPUOffload
    assert FSDP.MixedPrecision is MixedPrecision


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.fc1 = nn.Linear(108, 16)
        self.fc2 = nn.Linear(16, 10)
        self.register_buffer("seen", torch.zeros(()))
        self.note = "an attribute"

    def forward(self, x):
        self.seen += 1
        return self.fc2(torch.relu(self.fc1(self.conv(x).flatten(1))))

    def greet(self):
        return "hello"


@on_ranks(1)
def test_printing_shows_the_nested_wrapping(comm):
    policy = lambda module, recurse, nonwrapped_numel: size_based_auto_wrap_policy(  # noqa: E731
        module, recurse, nonwrapped_numel, min_num_params=1000
    )
    assert repr(FSDP(Net(), comm, auto_wrap_policy=policy)) == (
        "FullyShardedDataParallel(\n"
        "  (_fsdp_wrapped_module): Net(\n"
        "    (conv): Conv2d(1, 3, kernel_size=(3, 3), stride=(1, 1))\n"
        "    (fc1): FullyShardedDataParallel(\n"
        "      (_fsdp_wrapped_module): Linear(in_features=108, out_features=16, bias=True)\n"
        "    )\n"
        "    (fc2): Linear(in_features=16, out_features=10, bias=True)\n"
        "  )\n"
        ")"
    )


@pytest.mark.parametrize("door", ["wrapper", "function"])
def test_names_shapes_attributes_and_modes_are_the_plain_models(door):
    plain = Net()

    def body(comm):
        model = Net()
        model.load_state_dict(plain.state_dict())
        if door == "wrapper":
            model = FSDP(model, comm, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
        else:
            fully_shard(model.fc1, mesh=comm)
            fully_shard(model, mesh=comm)
        assert [(n, p.shape) for n, p in model.named_parameters()] == [
            (n, p.shape) for n, p in plain.named_parameters()
        ]
        assert all(isinstance(p, nn.Parameter) for p in model.parameters())
        assert dict(model.named_buffers()).keys() == dict(plain.named_buffers()).keys()
        around = nn.ModuleDict({"net": model})
        for root, path in ((model, ""), (around, "net.")):  # as scripts group by kinds of modules
            found = {
                f"{name}.{key}" if name else key: module
                for name, module in root.named_modules()
                for key, _ in module.named_parameters()
            }
            assert found.keys() == {path + name for name, _ in plain.named_parameters()}
            assert isinstance(found[f"{path}fc1.weight"], nn.Linear)
        assert list(model.state_dict()) == list(plain.state_dict())
        assert (model.note, model.greet()) == ("an attribute", "hello")
        assert not model.eval().training
        assert not model.fc1.training
        assert model.train().fc2.training
        visited = []
        model.apply(lambda m: visited.append(type(m)))
        assert nn.Conv2d in visited
        model(torch.ones(2, 1, 8, 8))
        return model.seen.item()

    assert LocalWorld(3).run(body) == [1, 1, 1]


def test_weights_that_cannot_be_written_fail_on_every_rank(tmp_path):
    failed = []

    def body(comm):
        model = shard(make("twice"), "twice", comm)
        with pytest.raises(ConfigurationError, match=r"could not write .*nowhere"):
            save_full_weights(model, tmp_path / "nowhere" / "weights.safetensors")
        failed.append(comm.rank)

    LocalWorld(2).run(body)
    assert sorted(failed) == [0, 1]


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_states_of_the_first_rank_go_to_all(strategy):
    """Ranks build different weights; all train those of rank 0, the buffers too."""
    models = [Net() for _ in range(3)]
    for number, model in enumerate(models):
        model.seen.fill_(number + 5)
    wanted = {k: v.clone() for k, v in models[0].state_dict().items()}

    def body(comm):
        model = FSDP(models[comm.rank], comm, ShardingStrategy[strategy], sync_module_states=True)
        found = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
        return found | dict(model.named_buffers())

    for found in LocalWorld(3).run(body):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("how", ["ignored_modules", "ignored_states", "ignored_params"])
def test_ignored_parameters_stay_as_they_are(how):
    plain = Net()
    plain(torch.ones(2, 1, 8, 8)).sum().backward()
    state = plain.state_dict()

    def body(comm):
        model = Net()
        model.load_state_dict(state)
        kept = model.fc1.weight
        if how == "ignored_params":
            fully_shard(model, mesh=comm, ignored_params=set(model.fc1.parameters()))
        else:
            policy = ModuleWrapPolicy({nn.Linear})
            chosen = [model.fc1] if how == "ignored_modules" else list(model.fc1.parameters())
            model = FSDP(model, comm, auto_wrap_policy=policy, **{how: chosen})
        assert model.fc1.weight is kept
        sharded = {n for n, p in model.named_parameters() if isinstance(p, ShardedParameter)}
        model(torch.ones(2, 1, 8, 8)).sum().backward()
        torch.testing.assert_close(kept.grad, plain.fc1.weight.grad)
        torch.testing.assert_close(model.fc2.weight.grad.full_tensor(), plain.fc2.weight.grad)
        return sharded

    expected = {"conv.weight", "conv.bias", "fc2.weight", "fc2.bias"}
    assert LocalWorld(2).run(body) == [expected] * 2


@on_ranks(1)
def test_a_device_id_says_where_shards_live(comm):
    model = FSDP(Net(), comm, device_id=torch.device("cpu"))
    with pytest.raises(ConfigurationError, match=r"ignored_states may hold .* got int"):
        FSDP(Net(), comm, ignored_states=[3])
    assert {p.local.device.type for p in model.parameters()} == {"cpu"}


# ---- refusals -----------------------------------------------------------------------------------


def untouched(model):
    return all(type(p) is nn.Parameter for p in model.parameters()) and not any(
        isinstance(m, FSDPModule) or m._forward_pre_hooks for m in model.modules()
    )


@on_ranks(1)
def test_options_of_the_wrong_kind_are_refused(comm):
    model = Net()
    with pytest.raises(ConfigurationError, match="mixed_precision must be a MixedPrecision"):
        FSDP(model, comm, mixed_precision=torch.bfloat16)
    with pytest.raises(ConfigurationError, match="sharding_strategy must be a fullshard"):
        FSDP(model, comm, "FULL_SHARD")
    with pytest.raises(ConfigurationError, match="backward_prefetch must be a fullshard"):
        FSDP(model, comm, backward_prefetch=1)
    with pytest.raises(ConfigurationError, match="process_group or device_mesh, not both"):
        FSDP(model, comm, device_mesh=comm)
    with pytest.raises(ConfigurationError, match=r"expected a process group, .*got str: 'dp'"):
        FSDP(model, "dp")
    with pytest.raises(ConfigurationError, match=r"expected a process group, .*got int: 2"):
        fully_shard(model, mesh=2)
    with pytest.raises(ConfigurationError, match="expected a module to wrap, got list"):
        FSDP([model], comm)
    with pytest.raises(ConfigurationError, match="have a forward, got ModuleList"):
        fully_shard(nn.ModuleList([model]), mesh=comm)
    with pytest.raises(ConfigurationError, match="at least one module"):
        fully_shard([], mesh=comm)
    assert untouched(model)


@on_ranks(2)
def test_a_container_whose_class_has_a_forward_can_be_sharded(comm):
    class Layers(nn.ModuleList):
        def forward(self, x):
            for layer in self:
                x = layer(x)
            return x

    class Named(nn.ModuleDict):
        def forward(self, x):
            return self["first"](x)

    plain = seeded(lambda: Named({"first": Layers([nn.Linear(2, 2)])}))
    x = torch.ones(3, 2)
    expected = plain(x)
    for module in (plain["first"], plain):
        fully_shard(module, mesh=comm)
    assert torch.equal(plain(x), expected)


@on_ranks(1)
def test_parameters_on_several_devices_are_refused_by_name(comm):
    model = Net()
    model.fc2.to("meta")
    for door in (lambda: FSDP(model, comm), lambda: fully_shard(model, mesh=comm)):
        with pytest.raises(ConfigurationError, match=r"'conv\.weight' is on cpu and 'fc2\."):
            door()
    assert untouched(model)


@on_ranks(1)
def test_an_unknown_policy_result_changes_nothing(comm):
    model = Net()
    for policy in (lambda **_: None, "blocks"):
        with pytest.raises(ConfigurationError):
            FSDP(model, comm, auto_wrap_policy=policy)
    assert untouched(model)


@on_ranks(1)
def test_a_policy_over_sharded_modules_or_with_unknown_options_is_refused(comm):
    model = Net()
    policy = CustomPolicy(lambda module: module is model.fc1 and {"sharding_strateggy": 1})
    with pytest.raises(ConfigurationError, match=r"options for Linear have sharding_strateggy"):
        FSDP(model, comm, auto_wrap_policy=policy)
    assert untouched(model)
    model.fc1 = FSDP(model.fc1, comm)
    with pytest.raises(ConfigurationError, match=r"but 'fc1' is sharded already"):
        FSDP(model, comm, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    FSDP(model, comm)(torch.ones(2, 1, 8, 8)).sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@on_ranks(1)
def test_sharding_twice_is_refused(comm):
    model = fully_shard(Net(), mesh=comm)
    with pytest.raises(UsageError, match="this FSDPNet is sharded already"):
        fully_shard(model, mesh=comm)
    wrapped = FSDP(Net(), comm)
    with pytest.raises(UsageError, match="this FullyShardedDataParallel is sharded already"):
        FSDP(wrapped, comm)


@pytest.mark.parametrize("door", ["wrapper", "function"])
@on_ranks(2)
def test_an_optimizer_created_before_sharding_is_found_at_its_first_step(comm, door):
    model = make("twice")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model = shard(model, "twice", comm, door=door)
    model(torch.ones(2, 5)).sum().backward()
    before = {n: p.local.clone() for n, p in model.named_parameters()}
    with pytest.raises(UsageError, match="created before the model was sharded"):
        optimizer.step()
    assert all(torch.equal(before[n], p.local) for n, p in model.named_parameters())


@on_ranks(1)
def test_sparse_gradients_are_refused_by_name(comm):
    model = fully_shard(nn.Embedding(5, 3, sparse=True), mesh=comm)
    with pytest.raises(NotSupportedError, match=r"'weight' got a torch.sparse_coo gradient"):
        model(torch.tensor([1, 2])).sum().backward()


@on_processes(4)
def test_process_groups_and_meshes_name_the_ranks(group):
    mesh = init_device_mesh("cpu", (4,))
    for where in (group, mesh):
        model = fully_shard(nn.Linear(3, 5), mesh=where)
        model(torch.ones(1, 3)).sum().backward()
        shown = model.weight.device_mesh
        assert (shown is mesh) == (where is mesh)
        assert shown.mesh.tolist() == [0, 1, 2, 3]


def train_where_nobody_has_joined(environment=()):
    """Train a step; return what is printed on stderr, and the number of ranks then joined."""
    for name in environment:
        os.environ.pop(name, None)
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        FSDP(nn.Linear(4, 4))(torch.ones(1, 4)).sum().backward()
    return told.getvalue(), torch.distributed.get_world_size()


def test_a_launchers_environment_initialises_the_default_group(gloo_world):
    ((told, ranks),) = gloo_world.launch(1, train_where_nobody_has_joined)
    assert ranks == 1
    assert "fullshard: initialised gloo over 1 ranks" in told


def test_without_a_group_and_without_a_launcher_it_says_what_to_do(gloo_world):
    missing = "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
    told = r"no process group to shard over: call torch\.distributed\.init_process_group.*"
    told += f"sets {', '.join(missing)}, missing here"
    with pytest.raises(RuntimeError, match=f"(?s)UsageError: {told}"):
        gloo_world.launch(1, train_where_nobody_has_joined, missing)


@pytest.mark.parametrize("door", ["wrapper", "function"])
@on_ranks(3)
def test_ranks_that_disagree_are_told_before_anything_changes(comm, door):
    def differently(comm, what):
        width = 4 if what == "shape" and comm.rank == 1 else 3
        model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 3))
        if what == "frozen" and comm.rank == 1:
            model[1].bias.requires_grad_(False)
        keep = what == "strategy" and comm.rank == 1
        if door == "wrapper":
            strategy = ShardingStrategy.SHARD_GRAD_OP if keep else ShardingStrategy.FULL_SHARD
            return model, lambda: FSDP(model, comm, strategy)
        return model, lambda: fully_shard(model, mesh=comm, reshard_after_forward=not keep)

    for what, line in (
        ("shape", r"0\.weight: \(3, 3\) .* on ranks 0, 2; \(4, 3\) .* on rank 1"),
        ("frozen", r"1\.bias: \(3,\) float32 trained.*; \(3,\) float32 frozen.* on rank 1"),
        ("strategy", r"unit .*: 3 slices.* on ranks 0, 2; .*=False.* on rank 1"),
    ):
        model, act = differently(comm, what)
        with pytest.raises(ConfigurationError, match=f"the ranks disagree(.|\n)*{line}"):
            act()
        assert untouched(model)


@on_processes(4)
def test_axes_to_shard_and_to_replicate_over(group):
    """For each way: ranks that share slices, replicas, and a gradient averaged over all of them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("host", "local"))
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    hybrid = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    groups = mesh.get_group(1), mesh.get_group(0)
    of_host = 0.5 if group.rank() < 2 else 2.5  # two ranks average their own numbers
    for door, where, expected in (
        (fully_shard, {"mesh": mesh, "dp_mesh_dims": Dims(shard="local")}, (2, 1, of_host)),
        (fully_shard, {"mesh": mesh, "dp_mesh_dims": Dims("local", "host")}, (2, 2, 1.5)),
        (fully_shard, {"mesh": mesh, "dp_mesh_dims": Dims(("host", "local"))}, (4, 1, 1.5)),
        (fully_shard, {"mesh": mesh}, (2, 2, 1.5)),
        (FSDP, {"device_mesh": mesh, **hybrid}, (2, 2, 1.5)),
        (FSDP, hybrid, (2, 2, 1.5)),
        (FSDP, {"process_group": groups, **hybrid}, (2, 2, 1.5)),
    ):
        layer = nn.Linear(5, 3)
        model = door(layer, **where)
        model(torch.full((1, 5), float(group.rank()))).sum().backward()
        ranks = managed_unit_of(model).unit.ranks
        grad = layer.weight.grad.full_tensor()[0, 0].item()
        assert (ranks.gather.size, ranks.replicas.size, grad) == expected
    del os.environ["LOCAL_WORLD_SIZE"]
