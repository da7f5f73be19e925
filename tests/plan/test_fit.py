# SPDX-License-Identifier: Apache-2.0
"""The fitted constants are what a fit to the rows that they name gives."""

import importlib.util
import sys
import tomllib
from dataclasses import fields, replace
from importlib import resources
from math import exp
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
def home(fit):
    return [fit.Scripted.of(row) for file in FILES for row in fit.read_rows(file)]


@pytest.fixture(scope="module")
def others(fit):
    return [fit.Scripted.of(row) for file in other_files() for row in fit.read_rows(file)]


@pytest.fixture(scope="module")
def rows(fit, home, others):
    return fit.fitted_of(home, others)


def other_files():
    """Those of further sources that the fit names."""
    return [BENCHMARKS / "data" / "unseen" / name for name in FITTED["fit"]["others_sha256"]]


def test_at_most_twelve_constants():
    assert len(fields(Constants)) <= 12
    assert set(FITTED["constants"]) == {field.name for field in fields(Constants)}


def test_the_fit_names_the_rows_that_are_here(fit):
    assert FITTED["fit"]["sha256"] == fit.digest(FILES)
    assert FITTED["fit"]["others_sha256"] == fit.digest(other_files())
    read = [row for file in [*FILES, *other_files()] for row in fit.read_rows(file)]
    assert FITTED["fit"]["rows"] == sum(fit.source_of(row) not in fit.NEVER for row in read)


def test_sources_that_are_never_fitted_have_rows(fit):
    read = [row for file in other_files() for row in fit.read_rows(file)]
    assert {fit.source_of(row) for row in read} >= fit.NEVER
    home = {fit.source_of(row) for file in FILES for row in fit.read_rows(file)}
    assert not fit.NEVER & home


def test_tables_of_one_source_are_left_out_together(fit):
    read = [row for file in [*FILES, *other_files()] for row in fit.read_rows(file)]
    found = {row.group: fit.source_of(row) for row in read}
    assert found["QF"] == found["QZ"] == found["QW"] == "QW"
    assert found["h100_80gb"] == found["a100_40gb"] == "MosaicML"


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


def test_the_spread_covers_nine_tenths_of_the_rows(fit, home):
    errors = [each.error(fitted_constants()) for each in home]
    nothing = fit.Program(0.0, 0.0)
    inside = sum(each.inside(fitted_spread(), nothing) for each in errors)
    assert 0.88 <= inside / len(errors) <= 0.96


def test_rows_at_home_are_told_within_six_percent(fit, home):
    assert fit.mape([each.log_error(fitted_constants()) for each in home]) < 0.06


def test_the_runs_of_the_fit_are_at_home(fit, home):
    _, kinds = fitted_runs()
    fitted = [fit.Features.of(kind, each) for kind, told in kinds.items() for each in told]
    assert all(each.kind in kinds for each in fitted)
    assert max(fit.extrapolated(each.features, fitted)[0] for each in home) < 0.2


def test_another_program_widens_each_end_by_as_much_as_left_out_sources_need(fit):
    near = fit.Error(log=0.1)
    far = near._replace(far=1.0)
    assert fit.program_of([[near] * 9], 0.2) == (0.0, 0.0)
    assert fit.program_of([[far] * 9], 0.05) == (0.0, 0.09)
    assert fit.program_of([[far._replace(log=-0.1)] * 9], 0.05) == (0.09, 0.0)
    assert fit.program_of([[far._replace(log=9.0)] * 9], 0.05) == (0.0, 1.0)  # nothing is enough


def test_a_row_counts_less_that_says_less(fit):
    read = {row.group: row for file in other_files() for row in fit.read_rows(file)}
    told, untold = (fit.Scripted.of(read[group]) for group in ("TK", "MT"))
    assert fit.NOISE < told.noise < untold.noise
    assert set(fit.counted([told] * 60)) == {0.5}
    assert set(fit.counted([told])) == {1.0}


def test_a_fit_finds_the_constants_that_rows_were_made_with(fit, home):
    truth = fit.constants_at(fit.np.array([0.5, *[0.0] * (len(fit.PRIORS) - 1)]))
    made = [
        replace(each, row=replace(each.row, tokens=each.row.tokens * exp(each.log_error(truth))))
        for each in home[::12]
    ]
    found = fit.constants_at(fit.fit(made).at)
    assert found.matmul_share == pytest.approx(truth.matmul_share, abs=0.01)


@pytest.mark.thorough
def test_the_interval_is_that_of_left_out_sources(fit, home, others, rows):
    at = fit.deviations_of(fitted_constants())
    spread, sources = fit.interval_of(home, others, fit.Slopes.of(rows, at))
    known = [each for name, each in sources.items() if name not in fit.NEVER]
    program, interval = fit.program_of(known, spread), FITTED["interval"]
    assert spread == pytest.approx(interval["spread"], abs=0.0011)
    assert program.sooner == pytest.approx(interval["sooner"], abs=0.011)
    assert program.later == pytest.approx(interval["later"], abs=0.011)
    assert fit.covered(known, spread, program) >= 0.85
