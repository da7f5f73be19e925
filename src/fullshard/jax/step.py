# SPDX-License-Identifier: Apache-2.0
"""`make_train_step`: a model, an optimizer and a loss function as one sharded, compiled step."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fullshard.core.errors import ConfigurationError
from fullshard.core.text import bytes_text, in_columns
from fullshard.jax.calls import NotAsPlanned
from fullshard.jax.execution import Regime
from fullshard.jax.gathers import has_conditional_collective, pack, resting_sharding
from fullshard.jax.mesh import AXES
from fullshard.jax.model import Model, is_key, read_model
from fullshard.jax.optimizer import read_optimizer
from fullshard.jax.options import Options, StepOptions, read_options
from fullshard.jax.placement import Placement, coverage, place, refuse_low_coverage
from fullshard.jax.program import KEY, StepProgram, batch_sharding
from fullshard.jax.state import RestingPlace, StateArrays, StateSpec, TrainState

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

    ``loss_fn(model, batch)`` returns the mean over its batch's dimension 0, or with
    ``has_aux=True`` that and a tree of arrays to average over devices. Each device computes the
    loss of its part of the batch, and the mean over devices is what is trained: a loss that divides
    by something else than the number of examples (say, of tokens that count) is then a mean of
    means. Random keys of an NNX model differ between devices and steps. Statistics such as
    BatchNorm's are of each device's part, averaged over devices after the step; integers among them
    (counts) must not depend on the batch, as each device keeps its own.

    For the keywords see `StepOptions`.

    Raises:
        ConfigurationError: for options that do not go together, a rule or ``wrt`` that matches
            nothing, blocks that differ under ``scan=True``, or too many bytes unsharded.
    """
    if tuple(mesh.axis_names) != AXES:
        raise ConfigurationError(
            f"expected a mesh with axes {AXES}, got {tuple(mesh.axis_names)}: use create_mesh"
        )
    chosen = read_options(options, mesh)
    found = read_model(model, chosen.wrt, chosen.scan)
    if chosen.key is not None:
        found.other[KEY] = jax.ShapeDtypeStruct(chosen.key.shape, chosen.key.dtype)
    placements = place(found.groups(), dict(mesh.shape), chosen.rule)
    refuse_low_coverage(placements, chosen.at_most_unsharded)
    return TrainStep(mesh, found, placements, chosen, (optimizer, loss_fn))


class TrainStep:
    """A compiled train step over a sharded state; made by `make_train_step`.

    ``placements`` says how the parameters rest, ``notes`` what was decided about the model and why:
    stacks, loops that are no scan, parameters that stay gathered, an optimizer on whole arrays.
    """

    def __init__(
        self,
        mesh: Mesh,
        model: Model,
        placements: Sequence[Placement],
        options: Options,
        functions: tuple[Any, Callable[..., Any]],
    ) -> None:
        tx, loss_fn = functions
        self.mesh = mesh
        self.options = options
        self.placements = tuple(placements)
        self.notes: list[str] = [
            f"{stack[0]} to {stack[-1]} are {len(stack)} equal layers" for stack in model.stacks
        ] + model.notes
        self._model = model
        self._regime = Regime()
        by_name = {each.name: each for each in placements}
        loss_dtype = jnp.result_type(float)
        plan = read_optimizer(tx, model, self.placements, mesh.shape["fsdp"], loss_dtype)
        if plan.note:
            self.notes.append(plan.note)
        self._optimizer = plan
        self._arrays = StateArrays(mesh, model, self.placements, plan)
        self._program = StepProgram(mesh, model, by_name, plan, loss_fn, options, self._regime)
        self._compiled: dict[Any, jax.stages.Compiled] = {}

    @property
    def specs(self) -> tuple[StateSpec, ...]:
        """All arrays of a state in their true shapes."""
        return self._arrays.specs

    @property
    def compilations(self) -> int:
        """How often the step was compiled: once for each shape of batch."""
        return len(self._compiled)

    @property
    def coverage(self) -> float:
        """The share of the parameters' bytes that is cut over the fsdp axis."""
        return coverage(self.placements)

    def variant(self, mesh: Mesh | None = None, **options: Unpack[StepOptions]) -> "TrainStep":
        """A step of the same model, optimizer and loss on another mesh, or with other options.

        ``wrt``, ``scan`` and ``key`` stay as they are. Nothing is shared with this step but what
        `init` takes values from; for analyses a `jax.sharding.AbstractMesh` does.

        Raises:
            ConfigurationError: as `make_train_step`, and if one of those three is given.
        """
        mesh = self.mesh if mesh is None else mesh
        for name in ("wrt", "scan", "key"):
            if name in options:
                raise ConfigurationError(f"{name} cannot change: call make_train_step anew")
        given: Any = {name: getattr(self.options, name) for name in StepOptions.__annotations__}
        if "rule" in options:
            given["at_most_unsharded"] = None
        chosen = read_options({**given, **options}, mesh)
        placements = place(self._model.groups(), dict(mesh.shape), chosen.rule)
        refuse_low_coverage(placements, chosen.at_most_unsharded)
        functions = (self._optimizer.tx, self._program.loss_fn)
        return TrainStep(mesh, self._model, placements, chosen, functions)

    def init(self) -> TrainState:
        """The state before the first step; with several processes all must call it."""
        shardings = self._arrays.shardings()
        key = {} if self.options.key is None else {KEY: self.options.key}
        if self._model.made:
            of_model = {name: shardings.other[name] for name in shardings.other if name not in key}
            make = jax.jit(self._make, out_shardings=(shardings.params, of_model))
            params, other = make()
        else:
            values = self._model.initial()
            params = self._arrays.params_from_host(values)
            other = self._arrays.other_from_host(
                {name: value for name, value in values.items() if name in self._model.other}
            )
        other |= self._arrays.other_from_host(key)
        trained = {name: params[name] for name in self._optimizer.placements}
        optimizer = jax.jit(self._optimizer.init, out_shardings=shardings.optimizer)(trained)
        step = self._arrays.other_from_host({"step": np.zeros((), np.int32)})["step"]
        return TrainState(params, optimizer, other, step)

    def _make(self) -> tuple[dict[str, Any], dict[str, Any]]:
        values = self._model.initial()
        params = {}
        for each in self.placements:
            members = [pack(each, values[spec.name]) for spec in each.members]
            rest = jnp.stack(members) if each.stacked else members[0]
            sharding = resting_sharding(self.mesh, each)
            params[each.name] = jax.lax.with_sharding_constraint(rest, sharding)
        return params, {name: values[name] for name in self._model.other if name != KEY}

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Any, Any]:
        """One step: the new state, the loss, and what the loss function returned beside it, or {}.

        ``batch`` is a tree of arrays whose dimension 0 is that of the global batch; with several
        processes each gives all of it, or arrays that are already spread over the mesh. ``state``
        must not be used again (``donate=False`` changes that).

        Raises:
            ConfigurationError: if the batch does not divide by devices and micro-batches, or
                ``state`` was made for another step.
        """
        self._check_state(state)
        batch = self._place_batch(batch)
        compiled = self.compiled(batch)
        result: tuple[TrainState, Any, Any] = compiled(state, batch)
        return result

    def compiled(self, batch: Any) -> jax.stages.Compiled:
        """The program for batches like this one (arrays or shapes); compiled when first asked."""
        leaves, treedef = jax.tree.flatten(batch)
        key = (treedef, *((tuple(leaf.shape), _dtype_on_device(leaf)) for leaf in leaves))
        if key not in self._compiled:
            self._compiled[key] = self.lowered(batch).compile()
        return self._compiled[key]

    def lowered(self, batch: Any) -> jax.stages.Lowered:
        """The program before compilation, for batches like this one; nothing is allocated."""
        self._check_batch(batch)
        abstract = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                leaf.shape, _dtype_on_device(leaf), sharding=batch_sharding(self.mesh, leaf)
            ),
            batch,
        )
        settled = set(self._regime.resident), set(self._regime.unrolled), list(self.notes)
        try:
            traced = self._settle(abstract)
        except Exception:
            # What was tried in vain says nothing about the next loss function or batch.
            self._regime.resident, self._regime.unrolled, self.notes[:] = settled
            raise
        platforms = None if isinstance(self.mesh, Mesh) else ("cpu",)  # of a mesh without devices
        return traced.lower(lowering_platforms=platforms)

    def _settle(self, abstract: Any) -> Any:
        """Trace until a regime is found under which the model works."""
        while True:
            try:
                traced = self._jitted().trace(self.abstract_state(), abstract)
                conditional = has_conditional_collective(traced.jaxpr)
                if conditional and not set(self._model.units) <= self._regime.resident:
                    self._gather_everything("a unit is called in a branch or a while loop")
                else:
                    return traced
            except NotAsPlanned as found:
                self._learn(found)
            except (ConfigurationError, NameError):
                raise  # what no simpler program would mend
            except Exception as error:
                self._simplify(error)

    @property
    def function(self) -> Callable[[TrainState, Any], tuple[TrainState, Any, Any]]:
        """The step as a pure function to be traced, as `lowered` has settled it by then."""
        return self._program

    def abstract_state(self) -> TrainState:
        """A state's shapes, dtypes and shardings; nothing is allocated."""
        return self._arrays.abstract()

    def resting_place(self, key: str) -> RestingPlace:
        """In which array of a state the array ``key`` (of `specs`) rests, and as which layer."""
        return self._arrays.resting_place(key)

    def gather_array(self, state: TrainState, key: str) -> np.ndarray[Any, Any]:
        """The array ``key`` (of `specs`), whole; with several processes all must call it."""
        return self._arrays.gather_array(state, key)

    def arrays(
        self, state: TrainState, kinds: Sequence[str] = ("parameters",)
    ) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        """Key and whole array of those kinds, gathered one after the other."""
        return self._arrays.arrays(state, kinds)

    def load_arrays(
        self, state: TrainState, items: Iterable[tuple[str, Any]], *, strict: bool = True
    ) -> TrainState:
        """``state``, not to be used again, with these arrays; see `StateArrays.load_arrays`."""
        return self._arrays.load_arrays(state, items, strict=strict)

    def merged(self, state: TrainState) -> Any:
        """The model as it was given, with whole values on the host, for export or evaluation."""
        whole = {}
        for spec in self.specs:
            if spec.kind in ("parameters", "other") and spec.path != KEY:
                # A copy: the state's own memory is used again by the next step.
                array = jnp.array(self.gather_array(state, spec.key))
                resting = state.other.get(spec.path, array)
                if is_key(resting):
                    array = jax.random.wrap_key_data(array, impl=jax.random.key_impl(resting))
                whole[spec.path] = array
        return self._model.rebuild(whole)

    def describe(self) -> str:
        """A table of the parameters: path, shape, how they rest, bytes on each device."""
        rows: list[tuple[object, ...]] = [("array", "shape", "rests as", "bytes per device")]
        for each in self.placements:
            shape = f"{len(each.members)} x {each.shape}" if each.stacked else str(each.shape)
            how = f"{each.form.value} {each.rest_shape} P({', '.join(map(repr, each.axes))})"
            rows.append((each.name, shape, f"{how} {each.reason}".rstrip(), each.rest_bytes))
        together = bytes_text(sum(each.rest_bytes for each in self.placements))
        return "\n".join(
            (
                in_columns(rows, right=(3,)),
                f"together {together} per device; {self.coverage:.1%} of all bytes sharded",
                *self.notes,
            )
        )

    def _jitted(self) -> Any:
        shardings = self._arrays.shardings()
        whole = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())
        # A new function each time: a trace that failed must not be found again.
        return jax.jit(
            lambda state, batch: self._program(state, batch),
            donate_argnums=(0,) if self.options.donate else (),
            out_shardings=(shardings, whole, whole),
        )

    def _place_batch(self, batch: Any) -> Any:
        self._check_batch(batch)

        def placed(leaf: Any) -> Any:
            sharding = batch_sharding(self.mesh, leaf)
            if isinstance(leaf, jax.Array):
                return leaf if leaf.sharding == sharding else jax.device_put(leaf, sharding)
            leaf = np.asarray(leaf)
            leaf = leaf.astype(_dtype_on_device(leaf))
            return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

        return jax.tree.map(placed, batch)

    def _check_batch(self, batch: Any) -> None:
        devices = self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        parts = devices * self.options.accumulate
        first: tuple[str, int] | None = None
        for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
            name = f"batch{jax.tree_util.keystr(path)}"
            if not hasattr(leaf, "shape"):
                raise ConfigurationError(f"{name} is a {type(leaf).__name__}, expected an array")
            if leaf.shape and leaf.shape[0] % parts:
                raise ConfigurationError(
                    f"{name} has shape {tuple(leaf.shape)}: {devices} devices x "
                    f"accumulate={self.options.accumulate} do not divide its {leaf.shape[0]} rows"
                )
            if leaf.shape:
                first = first or (name, leaf.shape[0])
                if leaf.shape[0] != first[1]:
                    raise ConfigurationError(
                        f"{name} has shape {tuple(leaf.shape)}, but {first[0]} has {first[1]} rows"
                    )

    def _check_state(self, state: TrainState) -> None:
        expected = self._arrays.abstract_flat()
        if not isinstance(state, TrainState):
            raise ConfigurationError(f"expected a TrainState, got {type(state).__name__}")
        for part, arrays in expected.items():
            given = getattr(state, part)
            for name in {**arrays, **given}:
                if name not in given or name not in arrays:
                    where = "lacks" if name not in given else "has, and the step does not know,"
                    raise ConfigurationError(f"the state {where} {part} {name!r}")
                if given[name].is_deleted():
                    # Running with it would end the process on a CPU.
                    raise ConfigurationError(
                        f"the state's {part} {name!r} was used up by a step before: go on with the "
                        "state which that returned, or make the step with donate=False"
                    )
                if given[name].shape != arrays[name]:
                    raise ConfigurationError(
                        f"the state's {part} {name!r} has shape {given[name].shape}, the step "
                        f"expects {arrays[name]}: another mesh, rule, model or optimizer made it; "
                        "arrays in true shapes go over by arrays() and load_arrays()"
                    )

    def _learn(self, found: NotAsPlanned) -> None:
        if found.unrolled and self.options.scan is True:
            raise ConfigurationError(f"scan=True, but {found}") from found
        if found.unrolled:
            self._regime.unrolled.add(found.unrolled)
            self._note(f"no scan: {found}")
            return
        stack = next((each for each in self._model.stacks if found.resident in each), [])
        if stack and self.options.scan is True:
            raise ConfigurationError(f"scan=True, but {found}") from found
        # Its equals would most likely be found out next, one after the other.
        self._regime.resident |= {found.resident, *stack}
        self._note(f"gathered from the beginning to the end: {found}")

    def _simplify(self, error: Exception) -> None:
        """Try again with less: the fault may be the loss function's own, and comes again then."""
        model, regime = self._model, self._regime
        stacks = {stack[0] for stack in model.stacks}
        said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if not stacks <= regime.unrolled and self.options.scan is not True:
            regime.unrolled |= stacks
            self._note(f"no scan at all, tracing it failed: {said}")
        elif not set(model.units) <= regime.resident and self.options.scan is not True:
            self._gather_everything(f"tracing units failed: {said}")
        else:
            raise error

    def _gather_everything(self, why: str) -> None:
        if self.options.scan is True:
            raise ConfigurationError(f"scan=True, but {why}")
        self._regime.resident |= set(self._model.units)
        self._note(f"everything is gathered at the beginning: {why}")

    def _note(self, text: str) -> None:
        self.notes.append(text)
        _log.warning("%s", text)


def _dtype_on_device(leaf: Any) -> Any:
    """The dtype that an array has on devices: of 64 bits only where JAX is told to."""
    return jax.dtypes.canonicalize_dtype(leaf.dtype)
