# SPDX-License-Identifier: Apache-2.0
"""What a run says before it begins and leaves behind when it ends."""

from pathlib import Path

import torch

from fullshard.core.trace import Trace
from fullshard.torch import resting_bytes, save_full_weights
from fullshard.torch.memory_summary import Bytes
from fullshard.train.config import to_toml
from fullshard.train.metrics import Reporter, bytes_table, new_run_folder
from fullshard.train.setup import Run

__all__ = ["conclude", "introduce", "open_folder", "write_text"]

_PROMPT = "def "


def open_folder(run: Run) -> Path | None:
    """Make the run's folder on rank 0 and keep the settings there; None on the other ranks."""
    if not run.world.is_first:
        return None
    folder = new_run_folder(run.config.log.folder, run.config.run_name)
    (folder / "config.toml").write_text(to_toml(run.config), encoding="utf-8")
    return folder


def introduce(run: Run, reporter: Reporter) -> None:
    """Print the settings and what will roughly happen."""
    config, train = run.config, run.config.train
    for section, values in vars(config).items():
        settings = " ".join(f"{key}={value!r}" for key, value in vars(values).items())
        reporter.say(f"[{section}] {settings}")
    numel = sum(param.numel() for param in run.model.parameters())
    tokens = train.batch * run.data.tokens_per_sample
    reporter.say(
        f"\n{config.run_name}: {numel:,} parameters ({train.dtype}, {config.shard.strategy} over "
        f"{run.world.size} ranks on {run.world.device.type}); {run.data.describe()}.\n"
        f"{train.steps} steps of {tokens:,} {run.data.token}, about "
        f"{run.flops_per_token * tokens * train.steps / 1e12:,.1f} TFLOP in all; validation every "
        f"{train.eval_every} steps.\n"
    )


def conclude(run: Run, trace: Trace, reporter: Reporter) -> None:
    """Save the weights, print the table of bytes, a sample of text, and where things are.

    Collective. The trace is that of one whole step; gradients of the last step are still there.
    """
    config, console = run.config, reporter.console
    at_rest = resting_bytes(run.model, run.optimizer)
    held = Bytes(
        at_rest.parameters_bytes,
        at_rest.gradients_bytes,
        at_rest.optimizer_bytes,
        trace.peak_bytes,
    )
    # Only rank 0 writes; the others need no folder, but a path to talk about.
    folder = reporter.folder or Path(config.log.folder)
    save_full_weights(run.model, folder / "model.safetensors")
    if config.log.trace and run.world.is_first:
        trace.save(folder / "trace.jsonl")
    console.print()
    console.print(bytes_table(held, run.unsharded, run.world.size, config.shard.strategy))
    if config.model.name == "gpt" and config.log.sample_bytes:
        text = write_text(run, _PROMPT.encode(), config.log.sample_bytes)
        shown = _printable(text, console.encoding)
        reporter.say(f"\nA sample of what it writes after {_PROMPT!r}:\n\n{shown}\n")
    if run.world.is_first:
        names = ", ".join(sorted(path.name for path in folder.iterdir()))
        reporter.say(f"written to {folder}: {names}")


@torch.no_grad()
def write_text(run: Run, prompt: bytes, count: int, temperature: float = 0.7) -> bytes:
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


def _printable(text: bytes, encoding: str) -> str:
    shown = text.decode("utf-8", errors="replace").encode(encoding, "replace").decode(encoding)
    return "".join(c if c.isprintable() or c == "\n" else " " for c in shown)
