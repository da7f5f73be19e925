# SPDX-License-Identifier: Apache-2.0
"""The end of a run on the JAX engine: weights, the table of bytes, a sample of text."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from fullshard.core.spec import item_bytes
from fullshard.jax import TrainState, generate, save_weights
from fullshard.train.jax.setup import JaxRun
from fullshard.train.metrics import Reporter, bytes_table, writing
from fullshard.train.summary import PROMPT, say_files, say_sample

__all__ = ["bytes_of", "conclude", "write_text"]


def conclude(run: JaxRun, state: TrainState, reporter: Reporter) -> None:
    """Save the weights, print the table of memory, a sample of text, and where things are.

    With several processes all of them must call. The weights have the names of the torch model, so
    either engine reads the file.
    """
    config, console = run.config, reporter.console
    # Only process 0 writes; the others need no folder, but a path to talk about.
    folder = reporter.folder or Path(config.log.folder)
    with writing(folder / "model.safetensors"):
        save_weights(folder / "model.safetensors", run.step, state, run.plain.names())
    console.print()
    title = f"Memory for the model, {config.shard.strategy} over {run.devices}"
    console.print(bytes_table(title, bytes_of(run), "device"))
    if config.model.name == "gpt" and config.log.sample_bytes:
        say_sample(write_text(run, state, PROMPT, config.log.sample_bytes), reporter)
    say_files(reporter)


def bytes_of(run: JaxRun) -> list[tuple[str, int, int | None]]:
    """List the bytes of each device by purpose, and of one unsharded process (None: unknown).

    Parameters, gradients and optimizer state by their layout. The rest is the
    compiler's account of the whole step, gradients, full parameters and activations among it.
    """
    places, state = run.step.placements, run.step.abstract_state()
    trained = [each for each in places if each.spec.trainable]
    optimizer = sum(_device_bytes(leaf) for leaf in jax.tree.leaves(state.optimizer))
    unsharded_optimizer = sum(
        int(np.prod(spec.shape)) * item_bytes(spec.dtype)
        for spec in run.step.specs
        if spec.kind == "optimizer"
    )
    parameters = sum(each.rest_bytes for each in places)
    compiled = _compiled(run).memory_analysis()
    state_and_batch = compiled.argument_size_in_bytes
    written_apart = compiled.output_size_in_bytes - compiled.alias_size_in_bytes
    temporary = compiled.temp_size_in_bytes
    gradients = sum(each.rest_bytes for each in trained)
    at_rest = (
        parameters + gradients + optimizer,
        _true_bytes(places) + _true_bytes(trained) + unsharded_optimizer,
    )
    return [
        ("parameters", parameters, _true_bytes(places)),
        ("gradients", gradients, _true_bytes(trained)),
        ("optimizer state", optimizer, unsharded_optimizer),
        ("all of these, at rest", *at_rest),
        ("full units and activations in a step, at most", temporary, None),
        ("peak, with activations", state_and_batch + written_apart + temporary, None),
    ]


def _true_bytes(places: Any) -> int:
    return sum(each.spec.bytes for each in places)


def _device_bytes(leaf: Any) -> int:
    return int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize


def _compiled(run: JaxRun) -> Any:
    batch = run.batch(run.data.train_batch(0, range(run.config.train.batch)))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    return run.step.compiled(shapes)


def write_text(
    run: JaxRun, state: TrainState, prompt: bytes, count: int, temperature: float = 0.7
) -> bytes:
    """``prompt`` and ``count`` bytes that the model draws after it.

    With several processes all of them must call; they draw the same.
    """
    rows = np.frombuffer(prompt, np.uint8)[None].astype(np.int32)
    drawn = generate(run.step, state, rows, count, temperature, run.config.train.seed)
    return prompt + bytes(drawn[0].tolist())
