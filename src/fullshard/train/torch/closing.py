# SPDX-License-Identifier: Apache-2.0
"""The end of a run on the torch engine: weights, the table of bytes, a sample of text."""

from dataclasses import replace
from pathlib import Path

import torch

from fullshard.core.trace import Trace
from fullshard.torch import save_full_weights
from fullshard.torch.inspection import Bytes, resting_bytes
from fullshard.train.metrics import Reporter, bytes_table, writing
from fullshard.train.summary import PROMPT, say_files, say_sample
from fullshard.train.torch.setup import TorchRun

__all__ = ["conclude", "write_text"]


def conclude(run: TorchRun, trace: Trace, reporter: Reporter) -> None:
    """Save the weights, print the table of bytes, a sample of text, and where things are.

    Collective. The trace is that of one whole step; gradients of the last step are still there.
    """
    config, console = run.config, reporter.console
    at_rest = resting_bytes(run.model, run.optimizer)
    held = replace(at_rest, transient_bytes=trace.peak_bytes)
    # Only rank 0 writes; the others need no folder, but a path to talk about.
    folder = reporter.folder or Path(config.log.folder)
    save_full_weights(run.model, folder / "model.safetensors")
    if config.log.trace and run.world.is_first:
        with writing(folder / "trace.jsonl"):
            trace.save(folder / "trace.jsonl")
    console.print()
    title = f"Memory for the model, {config.shard.strategy} over {run.world.size} ranks"
    console.print(bytes_table(title, _rows(held, run.unsharded)))
    whole = run.unsharded.parameters_bytes
    if held.transient_bytes and whole:
        reporter.say(
            f"What rests is cut by the number of ranks. The units that a step has whole are not: "
            f"here they take {held.transient_bytes / whole:.0%} of the parameters' memory. The "
            "more blocks a model has, the smaller that part; a small one gains little at its peak."
        )
    if config.model.name == "gpt" and config.log.sample_bytes:
        say_sample(write_text(run, PROMPT, config.log.sample_bytes), reporter)
    say_files(reporter)


def _rows(rank: Bytes, unsharded: Bytes) -> list[tuple[str, int, int | None]]:
    return [
        ("parameters", rank.parameters_bytes, unsharded.parameters_bytes),
        ("gradients", rank.gradients_bytes, unsharded.gradients_bytes),
        ("optimizer state", rank.optimizer_bytes, unsharded.optimizer_bytes),
        ("all of these, at rest", rank.at_rest_bytes, unsharded.at_rest_bytes),
        ("full units in a step, at most", rank.transient_bytes, unsharded.transient_bytes),
        ("peak, without activations", rank.total_bytes, unsharded.total_bytes),
    ]


@torch.no_grad()
def write_text(run: TorchRun, prompt: bytes, count: int, temperature: float = 0.7) -> bytes:
    """``prompt`` and ``count`` bytes that the model draws after it. Collective.

    All ranks run the same forwards, since each gathers parameters, and draw from the same seed.
    """
    generator = torch.Generator().manual_seed(run.config.train.seed)
    text = list(prompt)
    run.model.eval()
    for _ in range(count):
        seen = torch.tensor([text[-run.config.context :]], device=run.world.device)
        logits = run.model(seen)[0, -1].float().cpu()
        chances = torch.softmax(logits[:256] / temperature, dim=-1)
        text.append(int(torch.multinomial(chances, 1, generator=generator)))
    run.model.train()
    return bytes(text)
