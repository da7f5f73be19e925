# SPDX-License-Identifier: Apache-2.0
"""The record of a run on JAX has its steps, and what lies between them."""

from types import SimpleNamespace

from fullshard.report import read_run
from fullshard.train.jax.record import StepsRecord

WORLD = SimpleNamespace(part=(1, 2), where="4 devices")


def test_steps_are_noted_with_their_data_and_the_first_has_compiled(tmp_path):
    record = StepsRecord(str(tmp_path), WORLD, {"name": "x"})
    record.goes_on_from(4)
    for loss in (2.5, 1.25):
        with record.span("data"):
            pass
        record.note(loss=loss, tokens=64)
        with record.span("evaluation"):
            pass
    record.close("finished")
    run = read_run(tmp_path)
    assert (run.world, run.absent) == (2, (0,))
    (attempt,) = run.ranks[1].attempts
    assert (attempt.facts.engine, attempt.facts.units) == ("jax", ())
    assert [(step.step, step.loss, step.tokens) for step in attempt.steps] == [
        (4, 2.5, 64),
        (5, 1.25, 64),
    ]
    assert [list(step.sums_s) for step in attempt.steps] == [["data", "compile"], ["data", "step"]]
    assert [span.what for span in attempt.spans] == ["start", "evaluation", "evaluation"]
    assert all(sum(step.sums_s.values()) <= step.duration_s + 1e-6 for step in attempt.steps)
    assert attempt.ending == "finished"
