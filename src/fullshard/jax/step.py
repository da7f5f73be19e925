# SPDX-License-Identifier: Apache-2.0
"""The train step that users call: made, compiled, run, evaluated, and made to draw sequences."""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh

from fullshard.core.errors import ConfigurationError
from fullshard.core.text import bytes_text
from fullshard.jax.layers import AROUND_LOOP
from fullshard.jax.mesh import MeshAxes, read_mesh
from fullshard.jax.placing import as_key, by_path, describe, dtype_on_device, key_data, put, to_host
from fullshard.jax.program import (
    KEY,
    LARGE_BYTES,
    StepOptions,
    StepProgram,
    is_whole,
    read_options,
)
from fullshard.jax.rule import Placement, coverage, place, refuse_idle_axes, refuse_low_coverage
from fullshard.jax.state import ModelArrays, StateArrays, TrainState, read_model

__all__ = ["TrainStep", "generate", "make_train_step"]

_log = logging.getLogger(__name__)

_WHOLE = "if it is the same for all examples, name it by whole=(pattern,)"


def make_train_step(
    model: Any,
    optimizer: Any,
    loss_fn: Callable[..., Any],
    mesh: Mesh,
    **options: Unpack[StepOptions],
) -> "TrainStep":
    """A sharded train step for ``model``; nothing is allocated or compiled before it is used.

    ``model`` is an `nnx.Module`, a pytree of arrays, or a function without arguments that makes
    one. A function is the way to large models: what it makes is never whole on one device. Of a
    model that exists already, arrays are copied to the mesh one by one.

    ``optimizer`` is an optax transformation. It sees parameters in the model's structure (for a
    module as nested dicts), so masks and labels work as written.

    ``loss_fn(model, batch)`` returns one number, or with ``has_aux=True`` that and a tree of
    arrays. It sees the whole batch, as on one device: means over what counts, losses between
    examples and statistics of a BatchNorm are those of all examples. It is traced once.

    ``mesh`` has an axis "fsdp" that cuts parameters, or one axis of any name; of others say
    ``shard_axis``. For the keywords see `StepOptions`.

    Raises:
        ConfigurationError: for options that do not go together, a rule or ``wrt`` that matches
            nothing, or too many bytes unsharded.
    """
    axes = read_mesh(mesh, options.get("shard_axis"), options.get("batch_axes"))
    chosen = read_options(options)
    read = read_model(model, chosen["wrt"])
    if chosen["key"] is not None:
        read.other[KEY] = jax.ShapeDtypeStruct(chosen["key"].shape, chosen["key"].dtype)
    return TrainStep(axes, read, chosen, (optimizer, loss_fn))


class TrainStep:
    """A compiled train step over a sharded state; made by `make_train_step`.

    ``placements`` says how the parameters rest, ``coverage`` which share of their bytes is cut.
    Once the loss is traced, ``notes`` tells of layers that were left to XLA and of large arrays
    that XLA gathers as it likes, ``outside`` the call to write by the name of such an array.
    """

    def __init__(
        self, axes: MeshAxes, model: ModelArrays, options: StepOptions, functions: tuple[Any, Any]
    ) -> None:
        self.placements: tuple[Placement, ...] = tuple(
            place(model.specs, axes, options["rule"], model.annotations)
        )
        if options["at_most_unsharded"] is not None:
            refuse_low_coverage(self.placements, options["at_most_unsharded"])
        elif options["rule"] is None:
            refuse_low_coverage(self.placements, 0.02, LARGE_BYTES)
        refuse_idle_axes(self.placements, axes)
        self.axes: MeshAxes = axes
        self.options: StepOptions = options
        self._model, self._functions = model, functions
        self.mesh: Any = axes.mesh
        self.coverage: float = coverage(self.placements)
        self._arrays = StateArrays(axes, model, self.placements, functions[0])
        self._program = StepProgram(model, self._arrays, functions[1], options)
        self.notes: list[str] = self._program.notes
        self.outside: dict[str, str] = self._program.outside
        self._compiled: dict[Any, jax.stages.Compiled] = {}
        self._apply = jax.jit(
            lambda function, *args: self._program.apply(function, *args), static_argnums=0
        )

    @property
    def compilations(self) -> int:
        """Count of compilations of the step: one for each shape of batch."""
        return len(self._compiled)

    def variant(self, mesh: Mesh | None = None, **options: Unpack[StepOptions]) -> "TrainStep":
        """A step of the same model, optimizer and loss on another mesh, or with other options.

        Raises `ConfigurationError` as `make_train_step`, and for ``wrt`` and ``key``, which stay.
        """
        for name in ("wrt", "key"):
            if name in options:
                raise ConfigurationError(f"{name} cannot change: call make_train_step anew")
        unsharded = None if "rule" in options else self.options["at_most_unsharded"]
        given: StepOptions = {**self.options, "at_most_unsharded": unsharded, **options}
        axes = read_mesh(mesh or self.mesh, given["shard_axis"], given["batch_axes"])
        return TrainStep(axes, self._model, read_options(given), self._functions)

    def init(self) -> TrainState:
        """The state before the first step; with several processes all must call it."""
        made = self._model.made
        values = {} if made else self._arrays.from_host(self._model.initial())
        with jax.set_mesh(self.mesh):
            state = jax.jit(self._begin, out_shardings=self._arrays.shardings)(values)
        if self.options["key"] is not None:
            state.other.update(self._arrays.from_host({KEY: self.options["key"]}))
        return state

    def _begin(self, values: dict[str, Any]) -> TrainState:
        arrays, model = self._arrays, self._model
        values = {KEY: self.options["key"], **(values or model.initial())}
        params = arrays.at_rest({name: values[name] for name in arrays.params})
        trained = {n: x for n, x in params.items() if arrays.params[n].spec.trainable}
        other = {name: values[name] for name in model.other}
        kept = arrays.tx.init(model.tree(trained))
        return TrainState(model.tree(params), kept, other, jnp.zeros((), jnp.int32))

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Any, Any]:
        """One step: the new state, the loss, and what the loss function returned beside it, or {}.

        ``batch`` is a tree of arrays whose dimension 0 is that of the global batch; with several
        processes each gives all of it, or arrays that are already spread over the mesh (see
        `fullshard.jax.global_batch`). ``state`` must not be used again (``donate=False`` changes
        that); arrays that were put in it and lie elsewhere, as on the host, are moved first.

        Raises:
            ConfigurationError: if the batch does not divide by devices and micro-batches,
                ``state`` was made for another step, or with ``check`` a layer mixes examples.
        """
        state, batch = self._arrays.fitted(state), self._checked(batch)
        placed = jax.tree_util.tree_map_with_path(
            lambda path, leaf: _on_device(leaf, self._lies(path, leaf)), batch
        )
        if self.options["check"] and not self._compiled:
            with jax.set_mesh(self.mesh):
                self._program.refuse_mixing(state, placed)
        return self.compiled(batch)(state, placed)

    def apply(self, state: TrainState, function: Callable[..., Any], *args: Any) -> Any:
        """``function(model, *args)`` with the model of ``state``, gathered as in a step.

        For evaluation, sampling, features: any computation without gradients. It is compiled once
        for each function and each shape of ``args``, whose arrays are cut as a batch is if their
        first dimension divides; the function sees whole arrays. The state stays as it is, and what
        the function changes of the model is dropped. With several processes all of them must call.
        """

        def placed(leaf: Any) -> Any:
            leaf = _read(leaf)
            cut = np.ndim(leaf) and np.shape(leaf)[0] % self.axes.parts == 0
            return _on_device(leaf, self.axes.sharding(*((self.axes.batch,) if cut else ())))

        args = jax.tree.map(placed, args)
        with jax.set_mesh(self.mesh):
            return self._apply(function, self._arrays.fitted(state), *args)

    def evaluate(
        self, state: TrainState, batch: Any, function: Callable[[Any, Any], Any] | None = None
    ) -> Any:
        """``function(model, batch)`` for a batch of examples; by default the loss function.

        An `nnx.Module` is in evaluation mode for it: no dropout, running statistics. With the loss
        function the result is the loss, or with ``has_aux`` (loss, aux).
        """
        key = () if function or self.options["key"] is None else (self.options["key"],)
        return self.apply(state, _Evaluation(function or self._functions[1], key), batch)

    def compiled(self, batch: Any) -> jax.stages.Compiled:
        """The program for batches like this one (arrays or shapes); compiled when first asked."""
        leaves, treedef = jax.tree.flatten(batch)
        key = (treedef, *((leaf.shape, dtype_on_device(leaf)) for leaf in leaves))
        if key not in self._compiled:
            self._compiled[key] = self.lowered(batch).compile()
        return self._compiled[key]

    def lowered(self, batch: Any) -> jax.stages.Lowered:
        """The program before compilation, for batches like this one; nothing is allocated."""

        def shape(path: Any, x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, dtype_on_device(x), sharding=self._lies(path, x))

        abstract = jax.tree_util.tree_map_with_path(shape, self._checked(batch))
        jitted = jax.jit(
            # A new function each time: a trace that failed must not be found again.
            lambda state, batch: self._program(state, batch),
            donate_argnums=(0,) if self.options["donate"] else (),
            out_shardings=(self._arrays.shardings, self.axes.sharding(), None),
        )
        self.notes.clear()
        self.outside.clear()
        with jax.set_mesh(self.mesh):
            traced = jitted.trace(self.abstract_state(), abstract)
        self.notes.extend(
            f"{each.name}, {bytes_text(each.spec.bytes)}, is gathered where XLA likes: "
            f"write {self.outside[each.name]}"
            for each in self.placements
            if each.sharded
            and each.name in self.outside
            and (each.spec.bytes >= LARGE_BYTES or self.outside[each.name] == AROUND_LOOP)
        )
        for note in self.notes:
            _log.warning("%s", note)
        return traced.lower()

    def abstract_state(self) -> TrainState:
        """A state's shapes, dtypes and shardings; nothing is allocated."""
        return self._arrays.abstract

    def merged(self, state: TrainState) -> Any:
        """The model as it was given, with whole values on the host, for export."""
        # Copies: the state's own memory is used again by the next step.
        arrays = {**by_path(state.params), **state.other}
        whole = {n: as_key(jnp.array(to_host(key_data(x))), x) for n, x in arrays.items()}
        return self._model.rebuild(whole)

    def describe(self) -> str:
        """A table of the parameters: path, shape, cut, bytes on each device; and the notes."""
        share = f"{self.coverage:.1%} of all bytes sharded"
        return "\n".join((describe(self.abstract_state().params), share, *self.notes))

    def _lies(self, path: Any, leaf: Any) -> Any:
        whole = is_whole(self.options, path, leaf)
        return self.axes.sharding(*(() if whole else (self.axes.batch,)))

    def _checked(self, batch: Any) -> Any:
        """``batch`` as arrays that the devices can share."""
        batch = jax.tree.map(_read, batch)
        parts, accumulate = self.axes.parts, self.options["accumulate"]
        first: tuple[str, int] | None = None
        for path, leaf in jax.tree.leaves_with_path(batch):
            name = f"batch{jax.tree_util.keystr(path)}"
            if not hasattr(leaf, "shape"):
                raise ConfigurationError(f"{name} is a {type(leaf).__name__}, expected an array")
            if is_whole(self.options, path, leaf):
                continue
            rows, shape = leaf.shape[0], tuple(leaf.shape)
            if not rows or rows % (parts * accumulate):
                raise ConfigurationError(
                    f"{name} has shape {shape}: {parts} devices x accumulate={accumulate} do not "
                    f"divide its {rows} rows; {_WHOLE}"
                )
            first = first or (name, rows)
            if rows != first[1]:
                raise ConfigurationError(
                    f"{name} has shape {shape}, but {first[0]} has {first[1]} rows; {_WHOLE}"
                )
        return batch


def _read(leaf: Any) -> Any:
    """Turn what is no array of JAX or NumPy, but can become one, into such."""
    other = hasattr(leaf, "__array__") and not isinstance(leaf, jax.Array | np.generic)
    return np.asarray(leaf) if other else leaf


def _on_device(leaf: Any, sharding: Any) -> Any:
    """An array of a batch where it lies; each process gives all of it, or its shards."""
    if not isinstance(leaf, jax.Array):
        leaf = np.asarray(leaf)
        leaf = leaf.astype(dtype_on_device(leaf))
    return put(leaf, sharding)


@dataclass(frozen=True)
class _Evaluation:
    """A function of a model that is put in evaluation mode before; compiled once for equal ones."""

    function: Callable[..., Any]
    key: tuple[Any, ...] = field(default=(), compare=False)

    def __call__(self, model: Any, *args: Any) -> Any:
        if hasattr(model, "eval"):
            model.eval()
        return self.function(model, *args, *self.key)


# -- sequences -----------------------------------------------------------------------------------


def generate(
    step: TrainStep,
    state: TrainState,
    prompt: Any,
    count: int,
    temperature: float = 1.0,
    seed: int = 0,
    decoder: tuple[Callable[..., Any], Callable[..., Any]] | None = None,
) -> np.ndarray[Any, Any]:
    """Tokens (rows, count) that the model of ``state`` draws after ``prompt`` (rows, length).

    The model has two methods, or ``decoder`` two functions that take it first.
    ``decode(tokens, cache, position)`` takes one token of each row (rows,) that stands at
    ``position`` and gives logits (rows, classes) for the next, and the cache of keys and values
    with this position in it; ``cache(rows, length)`` makes one with room for ``length`` positions.
    The whole is one program, a scan over positions in which each layer's weights are gathered when
    its turn comes. Rows are cut over the devices if they divide.

    With ``temperature`` 0 the likeliest token is taken. With several processes all of them must
    call, with the same arguments; all get the same tokens.

    Raises:
        ConfigurationError: if the prompt is empty or has another shape, or ``count`` is below 1.
    """
    prompt = np.asarray(prompt, np.int32)
    if prompt.ndim != 2 or not prompt.size or count < 1:
        raise ConfigurationError(
            f"generate wants a prompt of shape (rows, length) and a count of at least 1, got "
            f"{prompt.shape} and {count}"
        )
    arguments = (prompt, np.float32(temperature), np.uint32(seed))
    return to_host(step.apply(state, _Evaluation(_drawing(count, decoder)), *arguments))


@functools.cache
def _drawing(
    count: int, decoder: tuple[Callable[..., Any], Callable[..., Any]] | None
) -> Callable[..., Array]:
    """One program that draws."""

    def draw(model: Any, prompt: Array, temperature: Array, seed: Array) -> Array:
        if decoder is not None:
            decode, new_cache = (functools.partial(function, model) for function in decoder)
        elif hasattr(model, "decode") and hasattr(model, "cache"):
            decode, new_cache = model.decode, model.cache
        else:
            lacks = "decode" if hasattr(model, "cache") else "cache"
            raise ConfigurationError(
                f"generate wants a model with methods decode and cache, and {type(model).__name__} "
                f"has no {lacks}: give decoder=(decode, cache), functions that take the model first"
            )
        rows, length = prompt.shape
        key = jax.random.key(seed)

        def position(carry: Any, at: Array) -> tuple[Any, Array]:
            token, cache = carry
            logits, cache = decode(token, cache, at)
            logits = logits.astype(jnp.float32)
            noise = jax.random.gumbel(jax.random.fold_in(key, at), logits.shape)
            # The largest of logits plus Gumbel noise is a draw from their softmax.
            drawn = (logits + noise * temperature).argmax(-1).astype(prompt.dtype)
            known = lax.dynamic_index_in_dim(prompt, jnp.minimum(at + 1, length - 1), 1, False)
            token = jnp.where(at + 1 < length, known, drawn)
            return (token, cache), token

        start = prompt[:, 0], new_cache(rows, length + count)
        _, tokens = lax.scan(position, start, jnp.arange(length + count - 1))
        return tokens[length - 1 :].T

    return draw
