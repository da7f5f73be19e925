# SPDX-License-Identifier: Apache-2.0
"""Accelerate and Lightning Fabric train under the drop-in as over PyTorch's own FSDP.

Two worlds of two processes run the same cases at the same time, one with the drop-in; then each
loads what the other has saved.
"""

import socket
from importlib.util import find_spec

import numpy as np
import pytest
from support.library_cases import CASES, SAVED_AT
from support.library_world import LibraryWorld

PACKAGES = {"accelerate": "accelerate", "fabric": "lightning_fabric"}


def lacks(library, case):
    needed = [PACKAGES[library], *(["transformers"] if case.model == "gpt2" else [])]
    return [each for each in needed if find_spec(each) is None]


def chosen(only=lambda case: True):
    return [
        (library, name, lacks(library, case))
        for library, cases in CASES.items()
        for name, case in cases.items()
        if only(case)
    ]


def as_params(*only):
    return [
        pytest.param(
            f"{library}/{name}",
            marks=pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}"),
            id=f"{library}-{name}",
        )
        for library, name, missing in chosen(*only)
    ]


def installed(*only):
    return [f"{library}/{name}" for library, name, missing in chosen(*only) if not missing]


def saved_by_both(case):
    return case.torch_can_save


@pytest.fixture(scope="module")
def worlds():
    started = {each: LibraryWorld(drop_in=each, port=free_port()) for each in (False, True)}
    yield started
    for world in started.values():
        world.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {drop_in: tmp_path_factory.mktemp("saved") for drop_in in (False, True)}


@pytest.fixture(scope="module")
def answers(worlds, folders):
    """What each rank says, by whether the drop-in is on and by case."""
    for drop_in, world in worlds.items():
        world.start("run", installed(), folders[drop_in])
    return {drop_in: world.answers() for drop_in, world in worlds.items()}


@pytest.fixture(scope="module")
def answers_of_others(worlds, folders, answers):
    """The same of losses after loading what the other one has saved."""
    for drop_in, world in worlds.items():
        world.start("resume", installed(saved_by_both), folders[not drop_in])
    return {drop_in: world.answers() for drop_in, world in worlds.items()}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def good(answers, name, drop_in):
    ranks = answers[drop_in][name]
    assert all(ok for ok, _ in ranks), "\n".join(str(text) for ok, text in ranks if not ok)
    return [answer for _, answer in ranks]


@pytest.mark.parametrize("name", as_params())
def test_training_is_that_of_pytorch(answers, name):
    theirs = good(answers, name, drop_in=False)
    ours = good(answers, name, drop_in=True)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.engine, other.engine) == ("fullshard", "torch")
        assert mine.losses[-1] < 0.6 * mine.losses[0] or "gpt2" in case_of(name).model
        assert mine.losses == pytest.approx(other.losses, abs=1e-5)
        assert mine.norms == pytest.approx(other.norms, abs=1e-5)
    assert ours[0].weights.keys() >= theirs[0].weights.keys() != set()
    for key, expected in theirs[0].weights.items():
        # Adam makes much of gradients that are nearly nothing.
        np.testing.assert_allclose(ours[0].weights[key], expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", as_params())
def test_what_was_saved_is_loaded(answers, name):
    case = case_of(name)
    theirs = good(answers, name, drop_in=False)
    for mine, other in zip(good(answers, name, drop_in=True), theirs, strict=True):
        expected = mine.losses[SAVED_AT * case.accumulation :]
        if loses_optimizer_state(name):
            assert other.resumed != pytest.approx(expected, abs=1e-5)
            expected = other.resumed
        assert mine.resumed == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", as_params(saved_by_both))
def test_what_one_has_saved_the_other_loads(answers, answers_of_others, name):
    for drop_in in (False, True):
        resumed = [answer.resumed for answer in good(answers, name, drop_in)]
        for mine, expected in zip(good(answers_of_others, name, drop_in), resumed, strict=True):
            assert mine == pytest.approx(expected, abs=1e-5)


def case_of(name):
    library, case = name.split("/")
    return CASES[library][case]


def loses_optimizer_state(name):
    """Accelerate asks an optimizer that has not stepped which of its state to load: there is none.

    PyTorch's FSDP1 answers so as well.
    """
    case = case_of(name)
    sharded = case.options["state_dict_type"] == "sharded_state_dict"
    return name.startswith("accelerate/") and case.version == 1 and sharded
