# SPDX-License-Identifier: Apache-2.0
"""The traps that sharding engines fall into, and which tests stand before each."""

import re
from pathlib import Path

import pytest

TRAPS = {
    "tied weights across units": [
        "test_modes.py::test_tied_embeddings",
        "test_api.py::test_tied_weights_of_an_auto_wrapped_model_have_one_owner",
        "test_runtime.py::test_a_unit_stays_full_while_a_tied_parameter_is_reached_through_it",
    ],
    "mixed dtypes, frozen beside trainable": [
        "test_kinds_of_parameters.py::test_lora_costs_what_its_trained_elements_cost",
        "test_kinds_of_parameters.py::test_lora_equals_one_process",
        "test_runtime.py::test_frozen_parameters_have_no_gradients_and_units_of_them_no_reduce",
        "test_random_models.py::test_random_model",
    ],
    "scalars, empty and non-contiguous parameters": ["test_parity.py::test_wrapper_door"],
    "a local norm instead of the global one": [
        "test_optim.py::test_clip_grad_norm_clips_the_global_norm",
        "test_parameter.py::test_norms_are_those_of_the_whole",
    ],
    "infinities found on one rank only": [
        "test_optim.py::test_a_nan_on_one_rank_is_seen_by_all",
        "test_grad_scaler.py::",
    ],
    "an optimizer from before sharding": [
        "test_optim.py::test_an_optimizer_from_before_sharding_is_found_at_its_first_step",
        "test_api.py::test_an_optimizer_created_before_sharding_is_found_at_its_first_step",
    ],
    "what accumulation keeps": [
        "test_modes.py::test_accumulation",
        "test_memory_of_modes.py::test_what_accumulation_holds_between_micro_batches",
    ],
    "a state dict on one rank only": [
        "test_access.py::test_a_full_state_dict_on_one_rank_is_told_by_name",
    ],
    "parameters from the meta device that nobody initialised": [
        "test_initialisation.py::test_what_nobody_initialised_is_found",
        "test_initialisation.py::test_the_wrapper_finds_what_its_function_forgets",
    ],
    "a module called twice, a unit whose inputs need no gradient": [
        "test_parity.py::test_wrapper_door",
        "test_runtime.py::test_unusual_calls",
    ],
    "recomputation inside a unit": ["test_runtime.py::test_recomputation_in_and_around_units"],
    "an exception in mid-step": [
        "test_runtime.py::test_a_good_step_after_an_exception_in_the_middle_of_one",
    ],
    "evaluation, and forward without backward": [
        "test_runtime.py::test_evaluation_between_and_within_steps",
        "test_runtime.py::test_a_forward_without_backward_does_not_leave_stale_parameters",
        "test_runtime.py::test_forwards_without_backward_do_not_pile_up",
    ],
    "worlds that divide nothing, empty spans": [
        "test_parity.py::test_wrapper_door",
        "test_parameter.py::test_any_tiling_gives_the_full_tensor_and_norm",
    ],
}


@pytest.mark.parametrize("trap", TRAPS)
def test_each_has_its_tests(trap):
    for reference in TRAPS[trap]:
        file, function = reference.split("::")
        source = (Path(__file__).parent / file).read_text()
        assert re.search(rf"^def test_{function.removeprefix('test_')}", source, re.M), reference
