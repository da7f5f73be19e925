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
import optax
from jax import Array, lax
from jax.sharding import Mesh

from fullshard.core.errors import ConfigurationError
from fullshard.core.text import bytes_text
from fullshard.jax.layers import AROUND_LOOP
from fullshard.jax.mesh import MeshAxes, read_mesh
from fullshard.jax.placing import as_key, by_path, describe, dtype_on_device, key_data, put, to_host
from fullshard.jax.program import KEY, StepOptions, StepProgram, is_whole, read_options
from fullshard.jax.rule import (
    LARGE_BYTES,
    Placement,
    coverage,
    place,
    refuse_idle_axes,
    refuse_low_coverage,
)
from fullshard.jax.state import ModelArrays, TrainState, fitted, read_model, state_shapes

_log = logging.getLogger(__name__)


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
    arrays. It is traced once, and sees the whole batch ([Note: One mathematics] in `program.py`).

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
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise ConfigurationError(
            f"expected an optax GradientTransformation, got {type(optimizer).__name__}; of an "
            "nnx.Optimizer that is its .tx"
        )
    return TrainStep(axes, read, optax.with_extra_args_support(optimizer), loss_fn, chosen)


class TrainStep:
    """A compiled train step over a sharded state; made by `make_train_step`.

    ``placements`` says how the parameters rest, ``coverage`` which share of their bytes is cut.
    Once the loss is traced, ``notes`` tells of layers that were left to XLA and of large arrays
    that XLA gathers as it likes, ``outside`` the call to write by the name of such an array.
    """

    def __init__(
        self, axes: MeshAxes, model: ModelArrays, tx: Any, loss_fn: Any, options: StepOptions
    ) -> None:
        self.axes: MeshAxes = axes
        self.mesh: Any = axes.mesh
        self.options: StepOptions = options
        placements = place(model.specs, axes, options["rule"], model.annotations)
        self.placements: tuple[Placement, ...] = tuple(placements)
        self.coverage: float = coverage(placements)
        if options["at_most_unsharded"] is not None:
            refuse_low_coverage(placements, options["at_most_unsharded"])
        elif options["rule"] is None:
            refuse_low_coverage(placements, 0.02, LARGE_BYTES)
        refuse_idle_axes(placements, axes)
        by_name = {each.name: each for each in placements}
        self._program = StepProgram(axes, model, by_name, tx, loss_fn, options)
        self._shapes = state_shapes(axes, model, by_name, tx)
        self._rests = jax.tree.map(lambda x: x.sharding, self._shapes)
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
        was = self._program
        return TrainStep(axes, was.model, was.tx, was.loss_fn, read_options(given))

    def init(self) -> TrainState:
        """The state before the first step; with several processes all must call it."""
        model, key = self._program.model, self.options["key"]
        values = {} if model.made else model.initial()
        values.update({} if key is None else {KEY: key})
        rests = {**by_path(self._rests.params), **self._rests.other}
        for name, value in values.items():
            if isinstance(value, jax.ShapeDtypeStruct):
                raise ConfigurationError(
                    f"{name!r} of the model is a shape without values: give a function that makes "
                    "the model, or restore a state"
                )
            values[name] = as_key(put(to_host(key_data(value)), rests[name]), value)
        with jax.set_mesh(self.mesh):
            return jax.jit(self._program.begin, out_shardings=self._rests)(values)

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
        state, batch = fitted(state, self._shapes), self._checked(batch)
        placed = jax.tree.map_with_path(lambda path, x: put(x, self._lies(path, x)), batch)
        if self.options["check"] and not self._compiled:
            with jax.set_mesh(self.mesh):
                self._program.refuse_mixing(state, placed)
        return self.compiled(batch)(state, placed)

    def apply(self, state: TrainState, function: Callable[..., Any], *args: Any) -> Any:
        """``function(model, *args)`` with the model of ``state``, gathered as in a step.

        For any computation without gradients. It is compiled once for each function and each shape
        of ``args``, whose arrays are cut as a batch is if their first dimension divides. What the
        function changes of the model is dropped. With several processes all of them must call.
        """

        def placed(leaf: Any) -> Any:
            leaf = _read(leaf)
            cut = np.ndim(leaf) and np.shape(leaf)[0] % self.axes.parts == 0
            return put(leaf, self.axes.sharding(*((self.axes.batch,) if cut else ())))

        with jax.set_mesh(self.mesh):
            return self._apply(function, fitted(state, self._shapes), *jax.tree.map(placed, args))

    def evaluate(
        self, state: TrainState, batch: Any, function: Callable[[Any, Any], Any] | None = None
    ) -> Any:
        """``function(model, batch)`` for a batch of examples; by default the loss function.

        An `nnx.Module` is in evaluation mode for it: no dropout, running statistics. With the loss
        function the result is the loss, or with ``has_aux`` (loss, aux).
        """
        key = () if function or self.options["key"] is None else (self.options["key"],)
        return self.apply(state, _Evaluation(function or self._program.loss_fn, key=key), batch)

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

        jitted = jax.jit(
            # A new function each time: a trace that failed must not be found again.
            lambda state, batch: self._program(state, batch),
            donate_argnums=(0,) if self.options["donate"] else (),
            out_shardings=(self._rests, self.axes.sharding(), None),
        )
        self.notes.clear()
        self.outside.clear()
        with jax.set_mesh(self.mesh):
            abstract = jax.tree.map_with_path(shape, self._checked(batch))
            traced = jitted.trace(self._shapes, abstract)
        for each in self.placements:
            call = self.outside.get(each.name)
            if each.sharded and call and (each.spec.bytes >= LARGE_BYTES or call == AROUND_LOOP):
                text = f"{each.name}, {bytes_text(each.spec.bytes)}, is gathered where XLA likes"
                self.notes.append(f"{text}: write {call}")
        for note in self.notes:
            _log.warning("%s", note)
        return traced.lower()

    def abstract_state(self) -> TrainState:
        """A state's shapes, dtypes and shardings; nothing is allocated."""
        return self._shapes

    def merged(self, state: TrainState) -> Any:
        """The model as it was given, with whole values on the host, for export."""
        # Copies: the state's own memory is used again by the next step.
        arrays = {**by_path(state.params), **state.other}
        whole = {n: as_key(jnp.array(to_host(key_data(x))), x) for n, x in arrays.items()}
        return self._program.model.rebuild(whole)

    def describe(self) -> str:
        """A table of the parameters: path, shape, cut, bytes on each device; and the notes."""
        share = f"{self.coverage:.1%} of all bytes sharded"
        return "\n".join((describe(self._shapes.params), share, *self.notes))

    def _lies(self, path: Any, leaf: Any) -> Any:
        whole = is_whole(self.options, path, leaf)
        return self.axes.sharding(*(() if whole else (self.axes.batch,)))

    def _checked(self, batch: Any) -> Any:
        """``batch`` as arrays that the devices can share."""
        batch = jax.tree.map(_read, batch)
        parts, accumulate = self.axes.parts, self.options["accumulate"]
        rows = {}
        for path, leaf in jax.tree.leaves_with_path(batch):
            name, text = f"batch{jax.tree_util.keystr(path)}", ""
            if not hasattr(leaf, "shape"):
                raise ConfigurationError(f"{name} is a {type(leaf).__name__}, expected an array")
            if is_whole(self.options, path, leaf):
                continue
            rows[name] = count = leaf.shape[0]
            first = next(iter(rows))
            if not count or count % (parts * accumulate):
                text = f": {parts} devices x accumulate={accumulate} do not divide its {count} rows"
            elif count != rows[first]:
                text = f", but {first} has {rows[first]} rows"
            if text:
                raise ConfigurationError(
                    f"{name} has shape {tuple(leaf.shape)}{text}; if it is the same for all "
                    "examples, name it by whole=(pattern,)"
                )
        return batch


def _read(leaf: Any) -> Any:
    """Turn what is no array of JAX or NumPy, but can become one, into such."""
    other = hasattr(leaf, "__array__") and not isinstance(leaf, jax.Array | np.generic)
    return np.asarray(leaf) if other else leaf


@dataclass(frozen=True)
class _Evaluation:
    """A function of a model that is put in evaluation mode before; compiled once for equal ones."""

    function: Callable[..., Any]
    last: tuple[Any, ...] = ()
    key: tuple[Any, ...] = field(default=(), compare=False)

    def __call__(self, model: Any, *args: Any) -> Any:
        if hasattr(model, "eval"):
            model.eval()
        return self.function(model, *args, *self.last, *self.key)


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
    draw = _Evaluation(_draw, (count, decoder))
    return to_host(step.apply(state, draw, prompt, np.float32(temperature), np.uint32(seed)))


def _draw(
    model: Any, prompt: Array, temperature: Array, seed: Array, count: int, decoder: Any
) -> Array:
    given = decoder and [functools.partial(function, model) for function in decoder]
    decode, new_cache = given or [getattr(model, name, None) for name in ("decode", "cache")]
    if decode is None or new_cache is None:
        raise ConfigurationError(
            f"generate wants a model with methods decode and cache, and {type(model).__name__} has "
            f"no {'decode' if new_cache else 'cache'}: give decoder=(decode, cache), functions "
            "that take the model first"
        )
    rows, length = prompt.shape
    key = jax.random.key(seed)

    def position(carry: Any, at: Array) -> tuple[Any, Array]:
        logits, cache = decode(*carry, at)
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
