# SPDX-License-Identifier: Apache-2.0
"""The fitted constants are what a fit to the rows that they name gives."""

import importlib.util
import sys
import tomllib
from dataclasses import fields, replace
from importlib import resources
from pathlib import Path

import pytest

pytest.importorskip("numpy")

from fullshard.plan.cluster.cluster import Constants
from fullshard.plan.cluster.devices import fitted_constants, fitted_runs, fitted_spread

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
PACKAGE = resources.files("fullshard.plan.cluster")  # of a wheel, too
FITTED = tomllib.loads((PACKAGE / "constants.toml").read_text())


FILES = [
    *sorted((BENCHMARKS / "data").glob("*.csv")),
    *sorted((BENCHMARKS / "data" / "measured").glob("*.csv")),
]


@pytest.fixture(scope="module")
def fit():
    pytest.importorskip("scipy")
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location("plan_fit", BENCHMARKS / "plan_fit.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules["plan_fit"] = module
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def rows(fit):
    return [fit.Scripted.of(row) for file in FILES for row in fit.read_rows(file)]


def test_at_most_twelve_constants():
    assert len(fields(Constants)) <= 12
    assert set(FITTED["constants"]) == {field.name for field in fields(Constants)}


def test_the_fit_names_the_rows_that_are_here(fit):
    assert FITTED["fit"]["sha256"] == fit.digest(FILES)
    assert FITTED["fit"]["rows"] == sum(len(fit.read_rows(file)) for file in FILES)
    assert fit.digest(unseen_files()) == FITTED["fit"]["unseen_sha256"]


def unseen_files():
    """Those that the interval is of: not of the second blind test, nor what came later."""
    return [BENCHMARKS / "data" / "unseen" / name for name in FITTED["fit"]["unseen_sha256"]]


def slopes(fit, rows):
    """How much a step of a tenth of its prior's deviation, either way, would improve the fit."""
    best, better = fit.loss(rows, fitted_constants()), {}
    for name, (_, deviation, least, most) in fit.PRIORS.items():
        value = getattr(fitted_constants(), name)
        for step in (-0.1 * deviation, 0.1 * deviation):
            moved = min(most, max(least, value + step))
            changed = fit.loss(rows, replace(fitted_constants(), **{name: moved}))
            better[name] = max(better.get(name, 0.0), best - changed)
    return better


@pytest.mark.thorough
def test_no_constant_fits_these_rows_better(fit, rows):
    assert max(slopes(fit, rows).values()) < 0.05


@pytest.mark.thorough
def test_constants_fitted_to_other_rows_would_be_found_out(fit, rows):
    others = [each for each in rows if "70b" not in each.row.model.name]
    assert max(slopes(fit, others[::2]).values()) > 0.05


def test_the_spread_covers_nine_tenths_of_the_rows(fit, rows):
    errors = [each.error(fitted_constants()) for each in rows]
    inside = sum(each.inside(fitted_spread(), 0.0) for each in errors)
    assert 0.88 <= inside / len(errors) <= 0.96


def test_the_runs_of_the_fit_are_at_home(fit, rows):
    _, kinds = fitted_runs()
    fitted = [fit.Features.of(kind, each) for kind, told in kinds.items() for each in told]
    assert all(each.kind in kinds for each in fitted)
    assert max(fit.extrapolated(each.features, fitted)[0] for each in rows) < 0.2


def test_another_program_widens_intervals_by_as_much_as_unseen_sources_need(fit):
    near = fit.Error(log=0.1)
    far = near._replace(far=1.0)
    assert fit.program_of([[near] * 9], 0.2) == 0.0
    assert fit.program_of([[far] * 9], 0.05) == 0.09
    assert fit.program_of([[far._replace(log=9.0)] * 9], 0.05) == 1.0  # nothing is enough


@pytest.mark.thorough
def test_the_interval_is_that_of_the_unseen_rows_that_it_names(fit, rows):
    unseen = [fit.Scripted.of(row) for file in unseen_files() for row in fit.read_rows(file)]
    interval = fit.interval_of(rows, unseen, fitted_constants())
    assert interval["spread"] == pytest.approx(FITTED["interval"]["spread"], abs=0.0011)
    assert interval["program"] == pytest.approx(FITTED["interval"]["program"], abs=0.011)
