# SPDX-License-Identifier: Apache-2.0
"""Forked children, as of a DataLoader, that touch a sharded parameter."""

from support import values_workers as workers


def test_a_forked_child_that_would_communicate_is_told(gloo_world):
    for ends in gloo_world.run(2, workers.forked_children):
        assert ends.pop("elementwise") == "0.0"
        assert ends.pop("state_dict").startswith("OrderedDict")  # DTensors, which are there
        for what, text in ends.items():
            assert text is not None, f"{what} did not end"
            assert text.startswith("UsageError: process "), (what, text)
            assert "was forked from process" in text
            assert "full_tensor()" in text
