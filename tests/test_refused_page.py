# SPDX-License-Identifier: Apache-2.0
"""docs/refused.md: every entry is held by a test, and no test of the list has gone."""

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]

HELD_BY = {
    "ranks that start with different values": "test_rank_0_loads_and_the_others_forget",
    "ranks whose modules or parameters are registered": (
        "test_ranks_that_registered_modules_in_another_order_are_told"
    ),
    "an optimizer created": "test_an_optimizer_created_before_sharding_is_found_at_its_first_step",
    "a parameter replaced, deleted": "test_what_is_replaced_is_named",
    "`functional_call` with spans": ("test_functional_call_with_spans_and_transforms_are_named"),
    "`torch.func.grad`": "test_functional_call_with_spans_and_transforms_are_named",
    "`torch.autograd.grad`": "test_sharded_parameters_as_inputs_of_autograd_are_named",
    "schedules of pipelines": "test_a_backward_that_a_schedule_splits_is_refused_by_name",
    "`create_graph=True`": "test_double_backward_of_units_that_are_freed_is_named",
    "FSDP1's optimizer state dicts": (
        "test_fsdp1s_state_dicts_do_not_know_what_is_counted_for_all"
    ),
    "parameters of one module": "test_parameters_on_a_mesh_of_their_own",
    "experts that ranks cannot": "test_mistakes_are_refused_with_the_way_out",
    "optional parts": "test_what_ranks_could_not_recompute_together_is_refused",
    "a backward that begins inside": (
        "test_a_backward_into_a_unit_that_nobody_has_announced_is_named"
    ),
    "a backward that needs full parameters": (
        "test_requires_grad_changed_between_two_forwards_before_a_backward_is_named"
    ),
    "a backward after the parameters": "test_a_step_between_two_backwards_is_named",
    "an optimizer's step on some ranks": "test_a_rank_that_skips_a_step_is_named",
    "trained modules and": "test_whatever_is_trained_and_was_added_after_sharding_is_named",
    "weights tied after": "test_without_a_unit_around_both_and_after_the_first_forward_it_is_named",
    "replicas (NO_SHARD": "test_replicas_that_ranks_initialise_differently_are_named",
    "writes into views": "test_what_is_written_to_views_is_in_the_next_forward",
    "a parameter from before sharding": "test_a_replaced_original_in_forward_is_named",
    "a gradient that comes to": "test_a_gradient_of_a_replaced_original_is_named",
    "a buffer in a parameter's": "test_a_buffer_in_the_memory_of_a_parameter_is_named",
    "forward writes": "test_writes_in_forward_are_named",
    "`nn.Embedding(max_norm": "test_max_norm_is_refused_by_name",
    "norms, sums, extremes": "test_norms_and_sums_of_different_parameters_are_not_mixed",
    "`optimizer.state_dict()`": "test_states_of_optimizers_go_by_name_behind_the_function",
    "loading a whole optimizer": "test_states_of_optimizers_go_by_name_behind_the_function",
    "trained tensor classes": "test_two_inner_tensors_are_refused_by_name",
    "tensor classes whose": "test_classes_that_decide_what_travels_send_an_element_for_each",
    "parameters with `fsdp_pre_all_gather`": "test_classes_that_decide_what_travels_need_all_ranks",
    "the same in a unit": "test_what_decides_itself_what_is_gathered_is_not_compressed",
    "a module shared": "test_a_shared_module_cannot_give_such_parameters_up",
    "`copy.deepcopy` and": "test_copies_and_pickles_are_refused",
    "process groups without": "test_a_group_without_a_backend_is_refused_by_name",
    "collectives in a forked": "test_a_forked_child_that_would_communicate_is_told",
    "files of weights": "test_a_file_that_cannot_be_is_refused_before_anything_changes",
    "saving over": "test_only_regular_files_are_replaced",
    "state of another class": "test_state_of_another_class_is_refused_before_anything_has_changed",
    "optimizers that need whole": "test_optimizers_that_need_whole_tensors_are_refused_by_name",
    "the same over `align=": "test_optimizers_that_look_beyond_a_matrix_are_refused",
    '`align="matrix"` with': "test_refused_is_what_needs_equal_slices",
    "`exchange_matrices` of": "test_refused_is_what_owners_cannot_step",
    "state that is neither": "test_state_that_cannot_be_told_is_refused_on_all_ranks",
    "torchao's optimizers": "test_state_in_blocks_needs_rows",
    "`Shard(d)`": "test_what_is_no_placement_is_refused",
    "TorchScript modules": "test_torchscript_modules_are_named",
    "`set_reshard_after_forward`": "test_resharding_may_be_chosen_in_the_step_of_others",
    "sparse gradients": "test_sparse_gradients_are_refused_by_name",
    "`overlap_optimizer`": "test_optimizers_that_cannot_go_unit_by_unit_are_refused",
    "`dp_mesh_dims` without": "test_a_mesh_without_a_dim_to_shard_over",
    "`FSDP_USE_FULL_PREC_IN_EVAL": "test_full_precision_in_evaluation_is_refused",
    "communication hooks": "test_communication_hooks_do_not_go_with_hybrid_sharding",
    "saving a `LOCAL": "test_spans_are_not_saved_as_if_they_were_copies_of_one_tensor",
    "`.data` of another": "test_modules_that_hold_it_convert_or_refuse",
    "moving shards": "test_shards_that_are_away_are_not_gathered",
    "`use_memory_pool`": "test_what_registering_refuses",
    "`capture_step` off": "test_what_cannot_be_captured_is_named",
    "CPU offload on a device": "test_offload_is_refused_where_a_device_has_no_streams",
    "recording a step": "test_what_cannot_be_recorded_is_told",
    "parameters of one unit": "test_parameters_on_several_devices_are_refused_by_name",
    "`param @ x`": "test_a_plain_scalar_takes_no_sharded_one",
    "`summon_full_params(": "test_summoning_one_unit_or_on_one_rank",
    "`param_dtype` of": "test_dtypes_that_are_none_are_refused",
    "parameters that are DTensors": "test_what_needs_the_whole_is_refused",
    "state dicts of a parameter": "test_ranks_that_are_no_dim_of_the_tensor_axis_mesh",
    "checkpoints of values": "test_values_that_checkpoints_cannot_hold",
    "a `ShardedTensor`": "test_sharded_tensors_cut_otherwise_are_refused",
    "`set_all_gather_layout`": "test_names_of_later_versions_are_refused_with_a_way_out",
    "`MixedPrecisionPolicy(param_dtype_override_fn": (
        "test_a_dtype_for_each_parameter_is_refused_with_a_way_out"
    ),
    "`FlatParameter`": "test_nothing_is_a_flat_parameter",
}


def test_every_entry_is_held_by_a_test():
    page = (ROOT / "docs/refused.md").read_text()
    rows = re.findall(r"^\| (?!what \||---)(.+?) \|", page, re.MULTILINE)
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for row in rows:
        (beginning,) = [each for each in HELD_BY if row.startswith(each)]
        assert f"def {HELD_BY[beginning]}(" in tests, row
    assert len(rows) == len(HELD_BY)


# Where the engine raises NotSupportedError, and the entry that says so; one for each place.
RAISED_FOR = {
    "checkpoint/tensors.py:local_part": ["checkpoints of values", "checkpoints of values"],
    "checkpoint/tensors.py:_box_of": ["checkpoints of values"],
    "capture.py:_refuse": ["`capture_step` off"],
    "comm/process_group.py:ProcessGroupComm.__init__": ["process groups without"],
    "fsdp1/flat_params.py:FlatParameter.__new__": ["`FlatParameter`"],
    "fsdp1/optim_state_dicts.py:_packed": ["FSDP1's optimizer state dicts"],
    "fsdp1/flat_params.py:_CastableParameter.data": ["`FlatParameter`"],
    "fsdp1/flat_params.py:_RestingParameter._local_shard": ["`FlatParameter`"],
    "fsdp1/wrapper.py:FullyShardedDataParallel.register_comm_hook": ["communication hooks"],
    "fsdp1/units.py:UnitOptions.__post_init__": ["`FSDP_USE_FULL_PREC_IN_EVAL"],
    "fsdp2/placements.py:_parts": ["parameters of one module"],
    "fsdp2/placements.py:chosen_dims": ["`dp_mesh_dims` without"],
    "fsdp2/placements.py:cut_along.cut": ["`Shard(d)`", "`Shard(d)`"],
    "fsdp2/experts.py:_check_alike": ["experts that ranks cannot"],
    "fsdp2/experts.py:_check_list": ["experts that ranks cannot"] * 2,
    "fsdp2/experts.py:_tensor_dims": ["experts that ranks cannot"] * 2,
    "fsdp2/module.py:_refuse_of_later": ["`set_all_gather_layout`"],
    "measuring/record.py:record_step": ["recording a step"],
    "optim/checks.py:_refuse_parts": ["optimizers that need whole"],
    "optim/checks.py:_check_low_bit": ["torchao's optimizers"],
    "optim/exchange.py:exchange_matrices": ["`exchange_matrices` of", "`exchange_matrices` of"],
    "optim/overlap_optimizer.py:overlap_optimizer": ["`overlap_optimizer`", "`overlap_optimizer`"],
    "sharding/options.py:MixedPrecisionPolicy.__post_init__": [
        "`MixedPrecisionPolicy(param_dtype_override_fn"
    ],
    "sharding/find.py:_successor_of": ["a module shared"],
    "sharding/memory_pool.py:use_memory_pool": ["`use_memory_pool`"],
    "sharding/memory_pool.py:_register": ["`use_memory_pool`", "`use_memory_pool`"],
    "sharding/memory_pool.py:_registering_backend": ["`use_memory_pool`"],
    "sharding/shard.py:check_modules": ["TorchScript modules"],
    "sharding/shard.py:_check_embedding": ["`nn.Embedding(max_norm"],
    "sharding/shard.py:_check_compressible": ["the same in a unit"],
    "sharding/owners.py:matrices_owned": ['`align="matrix"` with'],
    "state/dtensors.py:without_sharded_tensor": ["a `ShardedTensor`"],
    "state/owned.py:_check": ["state that is neither"],
    "state/forms.py:LocalSpan._refuse": ["saving a `LOCAL"],
    "step/optional.py:OptionalUnits._look_for_checkpoint": ["optional parts", "optional parts"],
    "step/optional.py:OptionalUnits.before": ["optional parts"],
    "step/optional.py:_Question.__init__": ["optional parts", "optional parts"],
    "step/autograd_calls.py:_refuse_split_backward": ["schedules of pipelines"],
    "step/calls.py:check_backward": ["`create_graph=True`"],
    "tensor/parameter.py:ShardedParameter.data": ["`.data` of another"],
    "tensor/placements.py:_joined": ["state dicts of a parameter"],
    "tensor/tensor_parallel.py:tensor_parallel_of": ["parameters that are DTensors"],
    "unit/changes.py:rest_on": ["moving shards"],
    "unit/unit.py:Unit.refuse_unequal": ['`align="matrix"` with'],
    "unit/changes.py:tie": ["weights tied after"],
    "unit/extensions.py:_inner_name": ["trained tensor classes"],
    "unit/extensions.py:check_trained": ["trained tensor classes"],
    "unit/extensions.py:Extension.send": ["tensor classes whose"],
    "unit/full_parameters.py:FullParameters._find_extensions": [
        "parameters with `fsdp_pre_all_gather`"
    ],
    "unit/full_gradients.py:FullGradients.put": ["sparse gradients"],
    "unit/plan.py:Plan.__post_init__": ["CPU offload on a device"],
    "unit/guards/lent.py:refuse_transform": ["`torch.func.grad`"],
}


def raising_places(path, node, names=()):
    """``file:function`` of every ``NotSupportedError(...)`` in ``node``."""
    for child in ast.iter_child_nodes(node):
        inner = names
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inner = (*names, child.name)
        elif isinstance(child, ast.Call) and getattr(child.func, "id", "") == "NotSupportedError":
            yield f"{path}:{'.'.join(names)}"
        yield from raising_places(path, child, inner)


def test_every_gap_that_the_engine_names_has_an_entry():
    engine, places = ROOT / "src/fullshard/torch", Counter()
    for path in engine.rglob("*.py"):
        name = path.relative_to(engine).as_posix()
        places.update(raising_places(name, ast.parse(path.read_text())))
    assert places == {place: len(entries) for place, entries in RAISED_FOR.items()}
    assert {entry for entries in RAISED_FOR.values() for entry in entries} <= HELD_BY.keys()
