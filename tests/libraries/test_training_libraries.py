# SPDX-License-Identifier: Apache-2.0
"""Accelerate, Lightning Fabric and transformers train under the drop-in as over PyTorch's own FSDP.

Two ranks run each case with the drop-in and two without; then each loads what the other has saved.
"""

import functools
from importlib.util import find_spec

import numpy as np
import pytest
from support.layouts import SWAPPED
from support.library_cases import ACCELERATE, CASES, FABRIC, MODEL_PARALLEL, SAVED_AT
from support.library_training import train

PACKAGES = {
    "accelerate": "accelerate",
    "fabric": "lightning_fabric",
    "model_parallel": "lightning_fabric",
    "transformers": "transformers",
}

BY_ROW = ("model_parallel", "transformers")  # these look for DTensors

# One of each mechanism; the others are tried in thorough runs.
ALWAYS = ("accelerate/1-full", "model_parallel/distributed", "transformers/sharded")

# Another case exchanges files of their form; what differs is seen when they load their own.
FORMS_OF_OTHERS = (
    ACCELERATE["2-full-bf16"],
    FABRIC["sharded-recomputed"],
    MODEL_PARALLEL["whole-gpt2"],
)


def lacks(library, case):
    needed = [PACKAGES[library], *(["transformers"] if case.model != "net" else [])]
    return [each for each in needed if find_spec(each) is None]


def chosen(only=lambda case: True):
    return [
        (library, name, lacks(library, case))
        for library, cases in CASES.items()
        for name, case in cases.items()
        if only(case) and not (SWAPPED and library in BY_ROW)
    ]


def as_params(*only):
    return [
        pytest.param(
            f"{library}/{name}",
            marks=[
                pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}"),
                *([] if f"{library}/{name}" in ALWAYS else [pytest.mark.thorough]),
            ],
            id=f"{library}-{name}",
        )
        for library, name, missing in chosen(*only)
    ]


def exchanged(case):
    return case.torch_can_save and case not in FORMS_OF_OTHERS


@pytest.fixture(scope="module")
def answers(gloo_world, drop_in_world, tmp_path_factory):
    """Gives what each rank says of a case, with the drop-in or without; runs each once."""
    worlds = {False: gloo_world, True: drop_in_world}
    folders = {drop_in: tmp_path_factory.mktemp("saved") for drop_in in worlds}

    @functools.cache
    def get(name, drop_in, resumes_other=False):
        function = "resume" if resumes_other else "run"
        folder = str(folders[drop_in != resumes_other] / name.replace("/", "-"))
        return worlds[drop_in].run_joined(2, train, function, name, folder)

    return get


@pytest.mark.parametrize("name", as_params())
def test_training_is_that_of_pytorch(answers, name):
    theirs = answers(name, drop_in=False)
    ours = answers(name, drop_in=True)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.engine, other.engine) == ("fullshard", "torch")
        assert mine.losses[-1] < 0.6 * mine.losses[0] or case_of(name).model != "net"
        assert mine.losses == pytest.approx(other.losses, abs=1e-5)
        assert mine.norms == pytest.approx(other.norms, abs=1e-5)
    assert ours[0].weights.keys() >= theirs[0].weights.keys() != set()
    for key, expected in theirs[0].weights.items():
        # Adam makes much of gradients that are nearly nothing.
        np.testing.assert_allclose(ours[0].weights[key], expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", as_params())
def test_what_was_saved_is_loaded(answers, name):
    case = case_of(name)
    theirs = answers(name, drop_in=False)
    for mine, other in zip(answers(name, drop_in=True), theirs, strict=True):
        expected = mine.losses[SAVED_AT * case.accumulation :]
        if loses_optimizer_state(name):
            assert other.resumed != pytest.approx(expected, abs=1e-5)
            expected = other.resumed
        assert mine.resumed == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", as_params(exchanged))
def test_what_one_has_saved_the_other_loads(answers, name):
    saved = {drop_in: answers(name, drop_in) for drop_in in (False, True)}
    for drop_in, said in saved.items():
        resumed = [answer.resumed for answer in said]
        for mine, expected in zip(answers(name, drop_in, True), resumed, strict=True):
            assert mine == pytest.approx(expected, abs=1e-5)


def case_of(name):
    library, case = name.split("/")
    return CASES[library][case]


def loses_optimizer_state(name):
    """Accelerate asks an optimizer that has not stepped which of its state to load: there is none.

    PyTorch's FSDP1 answers so as well.
    """
    case = case_of(name)
    if not name.startswith("accelerate/"):
        return False
    return case.version == 1 and case.options["state_dict_type"] == "sharded_state_dict"
