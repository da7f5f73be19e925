# SPDX-License-Identifier: Apache-2.0
"""docs/refused.md: every entry is held by a test, and no test of the list has gone."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

HELD_BY = {
    "ranks that start with different values": "test_rank_0_loads_and_the_others_forget",
    "ranks whose modules or parameters are registered": (
        "test_ranks_that_registered_modules_in_another_order_are_told"
    ),
    "a parameter replaced, deleted": "test_point_01_what_is_replaced_is_named",
    "`functional_call` with spans": (
        "test_point_01_functional_call_with_spans_and_transforms_are_named"
    ),
    "`torch.func.grad`": "test_point_01_functional_call_with_spans_and_transforms_are_named",
    "`torch.autograd.grad`": "test_point_06_sharded_parameters_as_inputs_of_autograd_are_named",
    "`create_graph=True`": "test_point_09_double_backward_of_units_that_are_freed_is_named",
    "a backward that begins inside": (
        "test_point_09_a_backward_into_a_unit_that_nobody_has_announced_is_named"
    ),
    "a backward after the parameters": "test_point_06_a_step_between_two_backwards_is_named",
    "an optimizer's step on some ranks": "test_point_06_a_rank_that_skips_a_step_is_named",
    "trained modules added": "test_point_06_modules_added_after_sharding_are_named",
    "a parameter from before sharding": "test_point_04_a_replaced_original_in_forward_is_named",
    "a gradient that comes to": "test_point_04_a_gradient_of_a_replaced_original_is_named",
    "a buffer in a parameter's": "test_point_04_a_buffer_in_the_memory_of_a_parameter_is_named",
    "forward writes": "test_point_05_writes_in_forward_are_named",
    "`nn.Embedding(max_norm": "test_point_05_max_norm_is_refused_by_name",
    "norms, sums, extremes": "test_norms_and_sums_of_different_parameters_are_not_mixed",
    "`optimizer.state_dict()`": "test_states_of_optimizers_go_by_name_behind_the_function",
    "loading a whole optimizer": "test_states_of_optimizers_go_by_name_behind_the_function",
    "tensor classes with": "test_point_19_two_inner_tensors_are_refused_by_name",
    "collectives in a forked": "test_a_forked_child_that_would_communicate_is_told",
    "files of weights": "test_a_file_that_cannot_be_is_refused_before_anything_changes",
    "saving over": "test_only_regular_files_are_replaced",
    "optimizers that need whole": "test_optimizers_that_need_whole_tensors_are_refused_by_name",
    "`Shard(d)`": "test_what_is_no_placement_is_refused",
    "sparse gradients": "test_sparse_gradients_are_refused_by_name",
    "`overlap_optimizer`": "test_optimizers_that_cannot_go_unit_by_unit_are_refused",
    "parameters that are DTensors": "test_what_needs_the_whole_is_refused",
    "a `ShardedTensor`": "test_sharded_tensors_cut_otherwise_are_refused",
    "`FlatParameter`": "test_point_19_nothing_is_a_flat_parameter",
}


def test_every_entry_is_held_by_a_test():
    page = (ROOT / "docs/refused.md").read_text()
    rows = re.findall(r"^\| (?!what \||---)(.+?) \|", page, re.MULTILINE)
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for row in rows:
        (beginning,) = [each for each in HELD_BY if row.startswith(each)]
        assert f"def {HELD_BY[beginning]}(" in tests, row
    assert len(rows) == len(HELD_BY)
