# SPDX-License-Identifier: Apache-2.0
"""A run of Hugging Face's Trainer leaves a record."""

import pytest
import torch
from torch import nn

from fullshard.report import read_run
from fullshard.torch.inspection import RecordingCallback


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(2, 1)

    def forward(self, x, labels):
        out = self.line(x)
        return {"loss": (out - labels).square().mean(), "logits": out}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.long
def test_steps_evaluations_and_saves_of_a_trainer_are_recorded(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    samples = [{"x": torch.ones(2), "labels": torch.ones(1)} for _ in range(16)]
    settings = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"),
        max_steps=6,
        per_device_train_batch_size=4,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    callback = RecordingCallback(tmp_path / "run", detailed_every=2)
    transformers.Trainer(
        Line(), settings, train_dataset=samples, eval_dataset=samples, callbacks=[callback]
    ).train()
    assert callback.run is None
    (attempt,) = read_run(tmp_path / "run").ranks[0].attempts
    assert attempt.ending == "finished"
    assert [each.step for each in attempt.steps] == list(range(6))
    assert all(each.loss is not None for each in attempt.steps)
    assert [span.what for span in attempt.spans] == [
        "start",
        *("evaluation", "checkpoint", "evaluation", "evaluation", "checkpoint"),
    ]
    assert all("optimizer" in each.sums_s for each in attempt.steps)
