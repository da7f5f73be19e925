# SPDX-License-Identifier: Apache-2.0
"""Predict the memory and time of a training run before anything is launched.

    from fullshard.plan import Run, cluster_of, named_device, predict, read_model

    cluster = cluster_of(named_device("h100"), 64)
    found = predict(read_model("llama3-8b"), Run(micro_batch=1), cluster)
    print(found.memory.peak_bytes, found.step_s, found.tokens_per_s)

`predict` tells of one configuration, `search` chooses one, `what_if` compares. Nothing here imports
more than the standard library and `fullshard.core`; only the command needs rich, to print.
"""

from fullshard.plan.choose.changes import Answer, Change, parse_question, smallest_change, what_if
from fullshard.plan.choose.search import Choice, Rejected, pareto, search
from fullshard.plan.choose.settings import Setup, with_setting
from fullshard.plan.choose.space import SearchSpace
from fullshard.plan.cluster.cluster import Cluster, Device, Link
from fullshard.plan.cluster.devices import cluster_of, device_names, named_device
from fullshard.plan.memory import MemoryForecast, forecast_memory
from fullshard.plan.model.config_json import model_from_config, read_model
from fullshard.plan.model.named import MODEL_NAMES, named_model
from fullshard.plan.model.operations import Model
from fullshard.plan.predict import Prediction, predict
from fullshard.plan.run import AttentionKernel, Engine, ExpertKernel, Loss, Recompute, Run, Wrap
from fullshard.plan.step.clock import Timeline, replay
from fullshard.plan.step.script import Script, write_script

__all__ = [
    "MODEL_NAMES", "Answer", "AttentionKernel", "Change", "Choice", "Cluster", "Device", "Engine",
    "ExpertKernel", "Link", "Loss", "MemoryForecast", "Model", "Prediction", "Recompute",
    "Rejected", "Run", "Script", "SearchSpace", "Setup", "Timeline", "Wrap", "cluster_of",
    "device_names", "forecast_memory", "model_from_config", "named_device", "named_model", "pareto",
    "parse_question", "predict", "read_model", "replay", "search", "smallest_change", "what_if",
    "with_setting", "write_script",
]  # fmt: skip
