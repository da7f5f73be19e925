# SPDX-License-Identifier: Apache-2.0
"""Specs, grouping and traces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.core.errors import ConfigurationError
from fullshard.core.grouping import group_parameters
from fullshard.core.spec import ModelSpec, ParamSpec
from fullshard.core.trace import Trace, TraceRecord


def test_sizes_of_specs():
    spec = ModelSpec((ParamSpec("w", (3, 4), "bfloat16"), ParamSpec("s", (), "float64")))
    assert (spec.numel, spec.bytes) == (13, 32)


def test_a_name_cannot_stand_for_two_parameters():
    with pytest.raises(ConfigurationError, match="'head' appears twice; list a tied parameter"):
        ModelSpec((ParamSpec("embed", (2,), aliases=("head",)), ParamSpec("head", (2,))))


def test_a_parameter_belongs_to_the_deepest_unit_around_all_its_places():
    params = [
        ParamSpec("embed", (1,), aliases=("blocks.1.out",)),
        ParamSpec("blocks.0.w", (1,), aliases=("blocks.1.w",)),
        ParamSpec("blocks.0.mlp.w", (1,)),
        ParamSpec("blocks.0.norm", (1,), aliases=("blocks.0.mlp.norm",)),
        ParamSpec("blocks.10.w", (1,)),
    ]
    groups = group_parameters(params, ["", "blocks", "blocks.0", "blocks.1", "blocks.0.mlp"])
    names = {path: [param.name for param in members] for path, members in groups.items()}
    assert names == {
        "": ["embed"],
        "blocks": ["blocks.0.w", "blocks.10.w"],
        "blocks.0": ["blocks.0.norm"],
        "blocks.1": [],
        "blocks.0.mlp": ["blocks.0.mlp.w"],
    }


def test_a_parameter_outside_all_units_is_refused():
    with pytest.raises(ConfigurationError, match=r"'a\.w' lies in none of the units"):
        group_parameters([ParamSpec("a.w", (1,))], ["b"])


paths = st.lists(st.sampled_from("abc"), max_size=3).map(".".join)


@given(st.lists(paths, min_size=1, max_size=3), st.sets(paths))
def test_every_parameter_has_exactly_one_owner_that_contains_it(places, units):
    names = sorted({f"{place}.w" if place else "w" for place in places})
    param = ParamSpec(names[0], (1,), aliases=tuple(names[1:]))
    groups = group_parameters([param], [*sorted(units), ""] if "" not in units else sorted(units))
    owners = [path for path, members in groups.items() if members]
    assert len(owners) == 1
    assert all(owners[0] == "" or name.startswith(owners[0] + ".") for name in names)


def test_a_trace_survives_a_file(tmp_path):
    trace = Trace([TraceRecord("gather", "a", 0.5, 64, 128), TraceRecord("free", "a", 1.0, 64, 0)])
    trace.save(tmp_path / "trace.jsonl")
    assert Trace.load(tmp_path / "trace.jsonl") == trace
    assert (trace.peak_bytes, trace.count("gather"), len(trace)) == (128, 1, 2)
    assert Trace().peak_bytes == 0


@pytest.mark.parametrize("line", ["nonsense", '{"op": "gather"}', "[1]"])
def test_a_file_that_is_no_trace_is_refused(tmp_path, line):
    (tmp_path / "t").write_text(line + "\n")
    with pytest.raises(ConfigurationError, match=r"t:1 is no trace record"):
        Trace.load(tmp_path / "t")
