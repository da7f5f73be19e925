# SPDX-License-Identifier: Apache-2.0
"""The private names of torch that fullshard uses, each with the versions in which it was found.

torch promises nothing about names that begin with an underscore. Here they all are: a version of
torch that lacks one is refused when fullshard is imported, and not by an `AttributeError` in the
middle of a training run. ``tests/engine/test_private_names.py`` finds those that the source uses.

A table has a module a line (``#`` begins a comment) and what is taken from it, as ``Class.member``
if need be. A path is ``module:attribute.attribute``; what a class only annotates, and its instances
have, counts as there.
"""

import pkgutil
from collections.abc import Iterable

import torch

from fullshard.core.errors import TorchVersionError
from fullshard.core.tested import TESTED_TORCH


def _found_in(versions: tuple[str, ...], table: str) -> dict[str, tuple[str, ...]]:
    """Return the paths in a table, with ``versions`` each."""
    found: dict[str, tuple[str, ...]] = {}
    for line in table.splitlines():
        module, _, names = line.partition("#")[0].partition(":")
        found |= {f"{module.strip()}:{name}": versions for name in names.split()}
    return found


ENGINE = _found_in(
    TESTED_TORCH,
    """
    # Autograd: which backward this is, and which nodes it will run.
    torch: _C._current_graph_task_id _C._will_engine_execute_node _C._autograd._get_sequence_nr
    torch: _C._autograd._profiler_enabled _C._autograd._top_saved_tensors_default_hooks
    torch: _C._len_torch_dispatch_stack
    torch._C._dynamo: eval_frame eval_frame._FrameAction eval_frame._FrameExecStrategy
    torch._C._dynamo: eval_frame.set_code_exec_strategy
    torch.autograd: Variable._execution_engine
    torch.autograd.graph: Node._sequence_nr
    # Tensors: versions, views, hooks, classes of our own.
    torch: _C._increment_version _C._autograd._unsafe_set_version_counter
    torch: _C._disabled_torch_function_impl _C.DisableTorchFunctionSubclass
    torch: _C._SetExcludeDispatchKeyGuard _C.DispatchKey.ADInplaceOrView
    torch: _C._functorch.peek_interpreter_stack _C._VariableFunctions _C.TensorBase
    torch: Tensor._backward_hooks Tensor._base Tensor._is_view Tensor._make_wrapper_subclass
    torch: Tensor._version UntypedStorage._cdata
    torch._subclasses.fake_tensor: DataDependentOutputException DynamicOutputShapeException
    torch._subclasses.fake_tensor: FakeTensor FakeTensorMode
    # Operations: lists in one launch, and what a dispatch hands over.
    torch: _amp_foreach_non_finite_check_and_unscale_ _foreach_copy_ _foreach_norm _foreach_zero_
    torch: ops.aten._amp_foreach_non_finite_check_and_unscale_ ops.aten._reshape_alias
    torch: ops.aten._to_copy ops.aten._unsafe_view ops.aten.add.Tensor._overloadname
    torch: ops.aten.add.Tensor._overloadpacket ops.aten.add.Tensor._schema
    torch._ops: OpOverload
    torch._library.simple_registry: GenericTorchDispatchRuleHolder
    torch._library.simple_registry: GenericTorchDispatchRuleHolder.find
    torch.utils._python_dispatch: TorchDispatchMode is_traceable_wrapper_subclass
    torch.utils._python_dispatch: _get_current_dispatch_mode _pop_mode _push_mode
    torch.utils._pytree: keystr tree_flatten tree_flatten_with_path tree_leaves tree_map_only
    torch.utils._pytree: tree_unflatten treespec_dumps treespec_loads
    torch.utils: _foreach_utils
    # Modules and optimizers.
    torch.nn: Module._apply Module._buffers Module._call_impl Module._forward_hooks Module._modules
    torch.nn: Module._parameters
    torch.distributed.fsdp: _common_utils _flat_param MixedPrecision._module_classes_to_ignore
    torch.distributed.fsdp._flat_param: _ShardParamInfo
    torch.optim: SGD._init_group Optimizer._optimizer_state_dict_post_hooks
    torch.optim: Optimizer._optimizer_step_post_hooks
    torch.amp: GradScaler._unscale_grads_
    # Groups, meshes and DTensors.
    torch._C._distributed_c10d: AllgatherOptions ReduceScatterOptions
    torch.distributed: ProcessGroup._device_types ProcessGroup._get_backend
    torch.distributed.distributed_c10d: _get_default_store _get_split_source
    torch.distributed.distributed_c10d: _process_group_name _world
    torch.distributed._composable.contract: REGISTRY_KEY RegistryItem
    torch.distributed._shard.sharded_tensor.api: ShardedTensor
    torch.distributed.device_mesh: DeviceMesh._flatten
    torch.distributed.tensor._dtensor_spec: DTensorSpec TensorMeta
    torch.distributed.tensor._utils: compute_local_shape_and_global_offset
    torch.distributed.tensor.placement_types: _StridedShard
    """,
)

DROP_IN = _found_in(
    TESTED_TORCH,
    """
    torch.distributed.fsdp: _fully_shard
    torch.distributed._composable.fsdp: fully_shard
    torch.distributed.algorithms._checkpoint: checkpoint_wrapper
    torch.distributed.algorithms: _optimizer_overlap
    torch.distributed.fsdp.wrap: _Policy._run_policy
    """,
)

PROVE = _found_in(TESTED_TORCH, "torch.testing._internal.distributed.fake_pg: FakeStore")

OPTIONAL = _found_in(
    TESTED_TORCH,
    """
    # A list of types that take the fast way: without it ours take the slow one.
    torch.optim.optimizer: _foreach_supported_types
    torch.utils._foreach_utils: _foreach_supported_types
    # Set on first use, by one who asks for it.
    torch: Tensor._post_accumulate_grad_hooks
    torch.distributed: ProcessGroupGloo._Options._timeout
    # Without these a state dict under tensor parallelism is refused by name.
    torch.distributed.device_mesh: DeviceMesh._concatenate DeviceMesh._get_root_mesh
    # Waits in the backward of PyTorch's FSDP2 are not recorded without these.
    torch.distributed.fsdp: FSDPModule._get_fsdp_state
    # Whether torchao compiles its steps is asked where it has imported torch._dynamo.
    torch._dynamo: config.disable
    torch._dynamo.eval_frame: _stance
    """,
) | _found_in(
    (),
    """
    # On instances alone, where no check can see them: what FSDP2 keeps for a module, two marks that
    # we set and torch reads, and the ranks of an earlier generation of sharded tensors.
    torch.distributed.fsdp._fully_shard._fsdp_state: FSDPState._fsdp_param_group
    torch.distributed.fsdp._fully_shard._fsdp_state: FSDPState._fsdp_param_groups
    torch.nn: Parameter._is_param Parameter._fsdp_flattened Parameter._in_backward_optimizers
    torch.distributed._shard.sharded_tensor.api: ShardedTensor._process_group
    # In builds for CUDA alone; without it streams are compared as objects.
    torch: _C._cuda_getCurrentRawStream
    """,
)


def is_there(path: str) -> bool:
    """Return whether this torch has the name; imports its module."""
    module, _, attributes = path.partition(":")
    *owners, name = attributes.split(".")
    try:
        owner = pkgutil.resolve_name(f"{module}:{'.'.join(owners)}")
        if hasattr(owner, name) or name in getattr(owner, "__annotations__", {}):
            return True
        pkgutil.resolve_name(f"{module}.{name}")  # a module that nobody has imported so far
    except (ImportError, AttributeError):
        return False
    return True


def require(names: Iterable[str]) -> None:
    """Refuse this torch unless it has all of ``names``.

    Raises:
        TorchVersionError: it lacks some; the message names them and the versions that have them.
    """
    missing = [path.replace(":", ".") for path in names if not is_there(path)]
    if missing:
        first, last = TESTED_TORCH[0], TESTED_TORCH[-1]
        raise TorchVersionError(
            f"fullshard needs {', '.join(missing)}, which torch {torch.__version__} has not. It "
            f"was tested with torch {', '.join(TESTED_TORCH)}: "
            f"pip install 'torch>={first},<={last}', or install a newer fullshard"
        )


require(ENGINE)
