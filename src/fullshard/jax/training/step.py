# SPDX-License-Identifier: Apache-2.0
"""`make_train_step`: a model, an optimizer and a loss function as one sharded, compiled step."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fullshard.core.errors import ConfigurationError
from fullshard.core.text import bytes_text, in_columns
from fullshard.jax.arrays.leaves import as_key
from fullshard.jax.arrays.mesh import Layout, read_mesh
from fullshard.jax.arrays.rule import (
    Placement,
    coverage,
    place,
    refuse_idle_axes,
    refuse_low_coverage,
)
from fullshard.jax.compute.context import Findings
from fullshard.jax.model.reading import Model, read_model
from fullshard.jax.training.batches import check_batch, dtype_on_device, on_device, read_arrays
from fullshard.jax.training.choice import choose
from fullshard.jax.training.options import Options, StepOptions, read_options
from fullshard.jax.training.program import KEY, StepProgram
from fullshard.jax.training.state import StateArrays, StateSpec, TrainState

__all__ = ["TrainState", "TrainStep", "make_train_step"]

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
    module as nested dicts) and in their true shapes, so masks and labels work as written.

    ``loss_fn(model, batch)`` returns one number, or with ``has_aux=True`` that and a tree of
    arrays. It sees the whole batch, as on one device: means over what counts, losses between
    examples and statistics of a BatchNorm are those of all examples, and so is what is returned
    beside the loss. It is traced once.

    ``mesh`` has an axis "fsdp" that cuts parameters, or one axis of any name; of others say
    ``shard_axis``. For the keywords see `StepOptions`.

    Raises:
        ConfigurationError: for options that do not go together, a rule or ``wrt`` that matches
            nothing, or too many bytes unsharded.
    """
    layout = read_mesh(mesh, options.get("shard_axis"), options.get("batch_axes"))
    chosen = read_options(options)
    found = read_model(model, chosen.wrt)
    if chosen.key is not None:
        found.other[KEY] = jax.ShapeDtypeStruct(chosen.key.shape, chosen.key.dtype)
    return TrainStep(layout, found, chosen, (optimizer, loss_fn))


class TrainStep:
    """A compiled train step over a sharded state; made by `make_train_step`.

    ``placements`` says how the parameters rest, ``notes`` what was found while the loss was traced:
    equal layers that were rolled into a scan, layers that were left to XLA. ``rivals`` are the
    programs among which mode "auto" has still to choose, if it was asked for them before.
    """

    def __init__(
        self, layout: Layout, model: Model, options: Options, functions: tuple[Any, Any]
    ) -> None:
        placements = place(model.specs, layout, options.rule, model.annotations)
        refuse_low_coverage(placements, options.at_most_unsharded)
        refuse_idle_axes(placements, layout)
        self.layout = layout
        self.options = options
        self.placements: tuple[Placement, ...] = tuple(placements)
        self._model = model
        self._functions = functions
        self._arrays = StateArrays(layout, model, placements, functions[0])
        self._findings = Findings()
        self._program = StepProgram(model, self._arrays, functions[1], options, self._findings)
        self.rivals: dict[str, TrainStep] = {}
        self._compiled: dict[Any, jax.stages.Compiled] = {}
        self._apply = jax.jit(
            lambda function, *args: self._program.apply(function, *args), static_argnums=0
        )

    @property
    def mesh(self) -> Mesh:
        """The devices."""
        mesh: Any = self.layout.mesh
        return mesh

    @property
    def notes(self) -> list[str]:
        """The decisions made while the loss was traced, and why."""
        return self._findings.notes

    @property
    def has_vocabulary(self) -> bool:
        """Whether the loss was seen to call `fullshard.jax.embed` or `cross_entropy`."""
        return self._findings.has_vocabulary

    @property
    def specs(self) -> tuple[StateSpec, ...]:
        """All arrays of a state in their true shapes, in the order of its leaves."""
        return self._arrays.specs

    @property
    def compilations(self) -> int:
        """How often the step was compiled: once for each shape of batch."""
        return len(self._compiled)

    @property
    def coverage(self) -> float:
        """The share of the parameters' bytes that the shard axis cuts.

        Once the loss was traced, without arrays that are gathered from beginning to end.
        """
        return coverage(self.placements, self._findings.held)

    def variant(self, mesh: Mesh | None = None, **options: Unpack[StepOptions]) -> "TrainStep":
        """A step of the same model, optimizer and loss on another mesh, or with other options.

        ``wrt`` and ``key`` stay as they are. Nothing is shared with this step but what `init` takes
        values from.

        Raises:
            ConfigurationError: as `make_train_step`, and if one of those two is given.
        """
        for name in ("wrt", "key"):
            if name in options:
                raise ConfigurationError(f"{name} cannot change: call make_train_step anew")
        given = self.options.given()
        if "rule" in options:
            given["at_most_unsharded"] = None
        given.update(options)
        layout = read_mesh(mesh or self.mesh, given.get("shard_axis"), given.get("batch_axes"))
        return TrainStep(layout, self._model, read_options(given), self._functions)

    def init(self) -> TrainState:
        """The state before the first step; with several processes all must call it."""
        shardings = self._arrays.shardings()
        if self._model.made:
            state = jax.jit(self._make, out_shardings=shardings)()
        else:
            values = self._arrays.from_host(self._model.initial())
            state = jax.jit(self._fill, out_shardings=shardings)(values)
        if self.options.key is not None:
            state.other.update(self._arrays.from_host({KEY: self.options.key}))
        return state

    def _make(self) -> TrainState:
        return self._begin(self._model.initial())

    def _fill(self, rest: dict[str, Any]) -> TrainState:
        """A state of arrays that rest already."""
        return self._begin({n: self._arrays.of_model(n).true(x) for n, x in rest.items()})

    def _begin(self, values: dict[str, Any]) -> TrainState:
        """A state of these arrays in their true shapes."""
        arrays, model = self._arrays, self._model
        values = {KEY: self.options.key, **values}
        values |= {n: arrays.of_model(n).constrained(values[n]) for n in arrays.params}
        trained = {n: values[n] for n, each in arrays.params.items() if each.spec.trainable}
        kept = arrays.tx.init(model.tree(trained))
        params = model.tree({n: values[n] for n in arrays.params})
        other = {n: values[n] for n in model.other}
        return arrays.at_rest(TrainState(params, kept, other, jnp.zeros((), jnp.int32)))

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Any, Any]:
        """One step: the new state, the loss, and what the loss function returned beside it, or {}.

        ``batch`` is a tree of arrays whose dimension 0 is that of the global batch; with several
        processes each gives all of it, or arrays that are already spread over the mesh (see
        `fullshard.jax.global_batch`). ``state`` must not be used again (``donate=False`` changes
        that); arrays that were put in it and lie elsewhere, as on the host, are moved first.

        Raises:
            ConfigurationError: if the batch does not divide by devices and micro-batches, or
                ``state`` was made for another step.
        """
        state, batch = self._arrays.fitted(state), self._checked(batch)
        compiled = self.compiled(batch)
        placed = jax.tree.map(lambda leaf: on_device(leaf, self.layout), batch)
        result: tuple[TrainState, Any, Any] = compiled(state, placed)
        return result

    def apply(self, state: TrainState, function: Callable[..., Any], *args: Any) -> Any:
        """``function(model, *args)`` with the model of ``state``; its weights are gathered at use.

        For evaluation, sampling, features: any computation without gradients. It is compiled once
        for each function and each shape of ``args``, whose arrays are cut as a batch is if their
        first dimension divides; the function sees whole arrays. The state stays as it is, and what
        the function changes of the model is dropped. With several processes all of them must call.
        """
        placed = jax.tree.map(
            lambda leaf: on_device(leaf, self.layout, whole_if_uneven=True), read_arrays(args)
        )
        return self._apply(function, self._arrays.fitted(state), *placed)

    def evaluate(
        self, state: TrainState, batch: Any, function: Callable[[Any, Any], Any] | None = None
    ) -> Any:
        """``function(model, batch)`` for a batch of examples; by default the loss function.

        An `nnx.Module` is in evaluation mode for it: no dropout, running statistics. With the loss
        function the result is the loss, or with ``has_aux`` (loss, aux).
        """
        key = () if function or self.options.key is None else (self.options.key,)
        return self.apply(state, _Evaluation(function or self._functions[1], key), batch)

    def compiled(self, batch: Any) -> jax.stages.Compiled:
        """The program for batches like this one (arrays or shapes); compiled when first asked."""
        leaves, treedef = jax.tree.flatten(batch)
        key = (treedef, *((tuple(leaf.shape), dtype_on_device(leaf)) for leaf in leaves))
        if key not in self._compiled:
            self._decide(batch)
        if key not in self._compiled:
            self._compiled[key] = self.lowered(batch).compile()
        return self._compiled[key]

    def lowered(self, batch: Any) -> jax.stages.Lowered:
        """The program before compilation, for batches like this one; nothing is allocated."""
        batch = self._checked(batch)
        self._decide(batch)
        abstract = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                leaf.shape, dtype_on_device(leaf), sharding=self.layout.of_batch(leaf)
            ),
            batch,
        )
        before = list(self.notes)
        try:
            traced = self._jitted().trace(self.abstract_state(), abstract)
            refuse_low_coverage(
                self.placements, self.options.at_most_unsharded, self._findings.held
            )
        except Exception:
            self.notes[:] = before
            raise
        for note in self.notes[len(before) :]:
            whole = "from beginning to end" in note or "left to XLA" in note
            _log.log(logging.WARNING if whole else logging.INFO, "%s", note)
        return traced.lower()

    def _decide(self, batch: Any) -> None:
        """Take the program that needs least, once, if that is asked for."""
        if self.options.mode == "auto":
            chosen = choose(self, batch)
            self.options, self._program = chosen.options, chosen._program
            self._findings, self._compiled = chosen._findings, chosen._compiled
            self.rivals = {}
            _log.info("%s, vocabulary %s", self.options.mode, self.options.vocabulary)

    def abstract_state(self) -> TrainState:
        """A state's shapes at rest, dtypes and shardings; nothing is allocated."""
        return self._arrays.abstract()

    def gather_array(self, state: TrainState, key: str) -> np.ndarray[Any, Any]:
        """The array ``key`` (of `specs`), whole; with several processes all must call it."""
        return self._arrays.gather_array(state, key)

    def arrays(
        self, state: TrainState, kinds: Sequence[str] = ("parameters",)
    ) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        """Key and whole array of those kinds, gathered one after the other."""
        for spec in self.specs:
            if spec.kind in kinds:
                yield spec.key, self._arrays.gather_array(state, spec.key)

    def load_arrays(
        self, state: TrainState, items: Iterable[tuple[str, Any]], *, strict: bool = True
    ) -> TrainState:
        """``state`` with these arrays; see `StateArrays.load_arrays`."""
        return self._arrays.load_arrays(state, items, strict=strict)

    def merged(self, state: TrainState) -> Any:
        """The model as it was given, with whole values on the host, for export."""
        whole = {}
        for spec in self.specs:
            if spec.kind in ("parameters", "other") and spec.path != KEY:
                # A copy: the state's own memory is used again by the next step.
                array = jnp.array(self.gather_array(state, spec.key))
                whole[spec.path] = as_key(array, state.other.get(spec.path))
        return self._model.rebuild(whole)

    def describe(self) -> str:
        """A table of the parameters: path, shape, how they rest, bytes on each device."""
        rows: list[tuple[object, ...]] = [("array", "shape", "rests as", "bytes per device")]
        for each in self.placements:
            rest = f"{each.rest_shape} " if each.padded else ""
            how = f"{rest}P({', '.join(map(repr, each.axes))}) {each.reason}".rstrip()
            rows.append((each.name, str(each.spec.shape), how, each.rest_bytes))
        together = bytes_text(sum(each.rest_bytes for each in self.placements))
        held = sum(x.spec.bytes for x in self.placements if x.name in self._findings.held)
        whole = f", {bytes_text(held)} gathered from beginning to end" if held else ""
        return "\n".join(
            (
                in_columns(rows, right=(3,)),
                f"together {together} per device; {self.coverage:.1%} of all bytes sharded{whole}",
                *self.notes,
            )
        )

    def _jitted(self) -> Any:
        # A new function each time: a trace that failed must not be found again.
        return jax.jit(
            lambda state, batch: self._program(state, batch),
            donate_argnums=(0,) if self.options.donate else (),
            out_shardings=(self._arrays.shardings(), self.layout.sharding(), None),
        )

    def _checked(self, batch: Any) -> Any:
        batch = read_arrays(batch)
        check_batch(batch, self.layout.parts, self.options.accumulate)
        return batch


@dataclass(frozen=True)
class _Evaluation:
    """A function of a model, which is put in evaluation mode before."""

    function: Callable[..., Any]
    more: tuple[Any, ...] = field(compare=False)

    def __call__(self, model: Any, batch: Any) -> Any:
        if hasattr(model, "eval"):
            model.eval()
        return self.function(model, batch, *self.more)
