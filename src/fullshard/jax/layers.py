# SPDX-License-Identifier: Apache-2.0
"""Layers whose weights are gathered, together, where they are computed: `gathered`, `scan_layers`.

[Note: A layer apart]
Inside of `jax.shard_map` each device gathers the layer's slices and computes the layer for its own
examples. Small slices of a dtype are laid one behind the other and travel in one collective;
weights of half a MiB and more travel alone: no message gets faster by being larger, and packing
copies. Autodiff turns the gathers into reduce-scatters. `jax.checkpoint` around all of it makes
backward gather again, so that no full weight waits for it.

That is the layer's own mathematics only if it treats examples apart, which the user says by writing
`gathered`. Seen from shapes, and left to XLA with a note, is a layer that has a result without
examples, changes its own state, or draws random numbers for all examples from one key. Statistics
that are only used inside are seen by ``make_train_step(check=True)``.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import AbstractMesh, PartitionSpec

from fullshard.core.errors import ConfigurationError, NotSupportedError
from fullshard.core.spec import ParamSpec
from fullshard.jax.mesh import Axis, MeshAxes
from fullshard.jax.placing import is_array, path_name, split_arrays, split_module
from fullshard.jax.rule import Placement, place

_ALONE_BYTES = 1 << 19
_POLICIES = {"matmuls": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}


@dataclass
class Tracing:
    """The step whose loss is being traced, for the helpers that it calls.

    ``reduce`` is the dtype in which gradients are summed (None: their own), ``notes`` are what
    helpers have to say; ``mixing`` has, when layers are checked, by name how far a layer's results
    for a part of the batch were from those for all of it.
    """

    axes: MeshAxes
    placements: Mapping[str, Placement]
    reduce: Any = None
    remat: Any = True
    notes: list[str] = field(default_factory=list)
    mixing: dict[str, float] | None = None

    def rests(self, x: Any) -> tuple[Axis, ...]:
        """The cut of a weight like this one, or of a slice of a stack of such, as the rule has it.

        Where several arrays of one shape are cut in different ways, the default rule answers; XLA
        then moves what lies otherwise.
        """
        alike = set()
        for each in self.placements.values():
            if each.spec.shape == x.shape:
                alike.add(each.axes)
            elif each.spec.shape[1:] == x.shape and each.axes[:1] == (None,):
                alike.add(each.axes[1:])
        if len(alike) == 1:
            return alike.pop()
        return place([ParamSpec("weight", x.shape, str(x.dtype))], self.axes)[0].axes

    def cut_dim(self, x: Any) -> int | None:
        """The dimension of such a weight that the shard axis cuts."""
        axes = self.rests(x)
        return axes.index(self.axes.shard) if self.axes.shard in axes else None

    def whole(self, x: Any) -> Any:
        """The weight where the shard axis cuts it not, and all others do."""
        if not is_array(x) or not x.ndim:
            return x
        axes = [None if axis == self.axes.shard else axis for axis in self.rests(x)]
        return lax.with_sharding_constraint(x, self.axes.sharding(*axes))


_tracing: ContextVar[Tracing | None] = ContextVar("fullshard_jax_tracing", default=None)


def current() -> Tracing | None:
    """The step whose loss is being traced, if its helpers are to act; else None."""
    return _tracing.get()


@contextmanager
def tracing(now: Tracing | None) -> Iterator[None]:
    """Make ``now`` the current one."""
    token = _tracing.set(now)
    try:
        yield
    finally:
        _tracing.reset(token)


def gathered(layer: Any, *, remat: Any = None) -> Callable[..., Any]:
    """``layer``, with weights that are gathered where it is called and dropped after.

    ``layer`` is a function of ``(weights, *args, **kwargs)``, ``weights`` being a pytree, or an
    `nnx.Module` or a method of one, which is called without its weights. The leading dimension of
    the first argument's arrays, and of all results, are examples; so is it of other arguments that
    must grow with them (masks, caches), which is seen from shapes. Everything else is the same for
    all examples. The layer must treat examples apart; see [Note: A layer apart].

    ``remat`` says what backward finds of forward: True (unless the step says otherwise) only what
    goes in, "matmuls" also products, False everything, full weights too; or a policy of
    `jax.checkpoint`. Outside of a step of `fullshard.jax.make_train_step` this is the layer itself.

    Raises:
        ConfigurationError: for what cannot be called, or another ``remat``.
    """
    _refuse_unknown(layer, remat)
    module = layer if isinstance(layer, nnx.Module) else getattr(layer, "__self__", None)
    if isinstance(module, nnx.Module):
        method = type(module).__call__ if layer is module else layer.__func__
        return functools.partial(_call_module, method, module, remat)
    name = getattr(layer, "__name__", type(layer).__name__)
    return lambda weights, *args, **kwargs: _called(
        layer, name, remat, layer, weights, args, kwargs
    )


def scan_layers(
    blocks: Any, layer: Callable[..., Any] | None = None, *, remat: Any = None
) -> Callable[..., Any]:
    """A function of ``(x, *args, **kwargs)`` that carries ``x`` through equal ``blocks``.

    ``blocks`` is a sequence of modules (NNX, Equinox) or of pytrees, or one whose arrays are
    stacked along dimension 0: large models are best kept so, as nothing is stacked in the step
    then. ``layer(block, x, *args, **kwargs)`` gives the next ``x``, of the same shape; without it
    blocks are called. Each is `gathered` when its turn comes and, by ``remat``, computed again in
    backward. Works the same outside of a step.

    Raises:
        ConfigurationError: for blocks that differ in more than the values of their arrays: call
            ``gathered(block)(x)`` for each of them then. As `gathered` for ``layer``, ``remat``.
    """
    listed = isinstance(blocks, list | tuple | nnx.List)
    items = list(blocks) if listed else [blocks]
    if not items:
        raise ConfigurationError("scan_layers has no blocks")
    function = layer or (lambda block, x, *args, **kwargs: block(x, *args, **kwargs))
    _refuse_unknown(function, remat)

    def through(x: Any, *args: Any, **kwargs: Any) -> Any:
        graph, arrays, rebuild = _stacked(items, listed)

        def body(x: Any, arrays: Any) -> tuple[Any, Any]:
            block = rebuild(arrays)
            if graph is None:
                return gathered(function, remat=remat)(block, x, *args, **kwargs), None
            block = nnx.merge(graph, block)
            x = _call_module(function, block, remat, x, *args, **kwargs)
            return x, nnx.state(block, nnx.Not(nnx.Param))

        x, after = lax.scan(body, x, arrays)
        for number, module in enumerate(items if graph is not None else ()):
            # Statistics and counts of random numbers.
            own = jax.tree.map(lambda leaf, n=number: leaf[n], after) if listed else after
            nnx.update(module, own)
        return x

    return through


def _refuse_unknown(layer: Any, remat: Any) -> None:
    if not callable(layer):
        raise ConfigurationError(
            "a layer is a function of (weights, x, ...) or an nnx.Module, got "
            f"{type(layer).__name__}; weights come in the call: gathered(layer)(weights, x)"
        )
    refuse_unknown_remat(remat)


def refuse_unknown_remat(remat: Any) -> None:
    """Raise `ConfigurationError` for a ``remat`` that `gathered` does not take."""
    if not (remat is None or callable(remat) or remat in (True, False, "matmuls")):
        raise ConfigurationError(
            f"remat={remat!r} is none of True, False, 'matmuls', or a policy of jax.checkpoint"
        )


def _call_module(method: Any, module: nnx.Module, remat: Any, *args: Any, **kwargs: Any) -> Any:
    """``method(module, *args, **kwargs)`` as `gathered` calls it."""
    graph, *parts = nnx.split(module, nnx.Param, ...)

    def pure(parts: Any, *args: Any, **kwargs: Any) -> Any:
        here = nnx.merge(graph, *parts)
        before = jax.tree.leaves(nnx.state(here, nnx.Not(nnx.Param)))
        result = method(here, *args, **kwargs)
        after = jax.tree.leaves(nnx.state(here, nnx.Not(nnx.Param)))
        if len(before) != len(after) or any(a is not b for a, b in zip(before, after, strict=True)):
            raise NotSupportedError("it changes its own state, as of statistics or random numbers")
        return result

    def plain(_: Any, *args: Any, **kwargs: Any) -> Any:
        return method(module, *args, **kwargs)

    return _called(pure, type(module).__name__, remat, plain, parts, args, kwargs)


def _called(
    layer: Any, name: str, remat: Any, plain: Any, weights: Any, args: Any, kwargs: Any
) -> Any:
    """The results of ``layer``; ``plain`` is the layer for all examples, as it was given."""
    now = current()
    if now is None or now.axes.parts == 1:
        return plain(weights, *args, **kwargs)
    with jax.named_scope(name):  # profiles and compiled programs tell layers by it
        if not now.axes.only_batch:  # with a tensor axis XLA gathers, where it is told to
            return plain(jax.tree.map(now.whole, weights), *args, **kwargs)
        try:
            apart = _Call(now, layer, remat, (weights, args, kwargs)).apart()
        except Exception as error:
            # Tracing with fewer examples may fail in any way; what fails with all of them, too,
            # does so in the next line.
            result = plain(weights, *args, **kwargs)
            said = (str(error) or type(error).__name__).splitlines()[0]
            note = f"{name} is left to XLA: {said}"
            now.notes.extend([note] if note not in now.notes else [])
            return result
        if now.mixing is None:
            return apart()
        result = plain(weights, *args, **kwargs)
        _compare(name, result, apart(), now.mixing)
        return result


class _Call:
    """One call of a layer in a step: its arrays in the order of the tree of all arguments."""

    def __init__(self, now: Tracing, layer: Callable[..., Any], remat: Any, given: Any) -> None:
        self.now, self.layer = now, layer
        self.remat = now.remat if remat is None else remat
        self.arrays, self.rebuild = split_arrays(given)
        self.owners = [p[:2] for p, x in jax.tree.leaves_with_path(given) if is_array(x)]
        self.weights = sum(map(is_array, jax.tree.leaves(given[0])))

    def _flat(self, *arrays: Any) -> Any:
        """The layer as a function of arrays alone; what it calls is computed as it stands."""
        weights, args, kwargs = self.rebuild(arrays)
        with tracing(None):
            return self.layer(weights, *args, **kwargs)

    def apart(self) -> Callable[[], Any]:
        """The layer's results, of which each device computes those of its own examples."""
        parts = self.now.axes.parts
        first = next((x for x in self.arrays[self.weights :] if x.ndim), None)
        if first is None or first.shape[0] % parts:
            raise NotSupportedError(f"{parts} devices do not divide the examples")
        rows = int(first.shape[0])
        twice, batched = self._batched(rows)
        own = self._resized(batched, rows // parts)
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):  # a device's own, in any mesh
            jaxpr, shapes = jax.make_jaxpr(self._flat, return_shape=True)(*own)
        _refuse_shared_draws(jaxpr.jaxpr)
        out = [
            _dim_of_examples(a.shape, b.shape, 2 * parts)
            for a, b in zip(jax.tree.leaves(shapes), jax.tree.leaves(twice), strict=True)
        ]
        mapped = self._mapped(jaxpr, batched, out)
        # Arrays that the layer closes over go in as well; they are the same for all examples.
        operands = (*self.arrays, *jaxpr.consts)
        return lambda: jax.tree.unflatten(jax.tree.structure(shapes), mapped(*operands))

    def _batched(self, rows: int) -> tuple[Any, list[bool]]:
        """Results for twice the examples, and which arrays have examples.

        Those of the first argument have; those of another that has as many rows, if the layer
        cannot be traced with more examples unless it has more rows, too.
        """
        sizes: dict[Any, set[int]] = {}
        owned = list(zip(self.owners, self.arrays, strict=True))
        for owner, x in owned[self.weights :]:
            sizes.setdefault(owner, set()).update(x.shape[:1])
        alike = [owner for owner, different in sizes.items() if different == {rows}]
        error: Exception = NotSupportedError("its first argument has no examples")
        for count in range(len(alike)):
            for more in itertools.combinations(alike[1:], count):
                grow = {alike[0], *more}
                batched = [owner in grow and x.ndim > 0 for owner, x in owned]
                try:
                    return jax.eval_shape(self._flat, *self._resized(batched, 2 * rows)), batched
                except Exception as failed:
                    error = failed
        raise error

    def _resized(self, batched: Sequence[bool], rows: int) -> list[Any]:
        """Shapes of the arrays, with so many rows where there are examples."""
        return [
            jax.ShapeDtypeStruct((rows, *x.shape[1:]) if flag else x.shape, x.dtype)
            for x, flag in zip(self.arrays, batched, strict=True)
        ]

    def _mapped(self, jaxpr: ClosedJaxpr, batched: Sequence[bool], out: Sequence[int]) -> Any:
        now, count = self.now, len(self.arrays)
        cuts = [now.cut_dim(x) if at < self.weights else None
                for at, x in enumerate(self.arrays)]  # fmt: skip
        specs = [
            now.axes.weight(cut) if cut is not None
            else now.axes.examples() if flag else PartitionSpec()
            for cut, flag in zip(cuts, batched, strict=True)
        ]  # fmt: skip
        specs += [PartitionSpec()] * len(jaxpr.consts)

        def local(*operands: Any) -> Any:
            run = jaxpr_as_fun(ClosedJaxpr(jaxpr.jaxpr, operands[count:]))
            return run(*_gather_all(now, operands[:count], cuts))

        mapped = now.axes.shard_map(
            local, in_specs=tuple(specs), out_specs=[now.axes.examples(dim) for dim in out]
        )
        if self.remat is False:
            return mapped
        policy = self.remat if callable(self.remat) else _POLICIES.get(self.remat)
        return jax.checkpoint(mapped, policy=policy)


def _compare(name: str, whole: Any, apart: Any, mixing: dict[str, float]) -> None:
    """Remember how far a layer's results for a part are from those for all examples."""

    def remember(far: Any) -> None:
        mixing[name] = max(mixing.get(name, 0.0), float(far))

    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(apart), strict=True):
        if jnp.issubdtype(a.dtype, jnp.inexact):
            a, b = a.astype(jnp.float32), b.astype(jnp.float32)
            most = jnp.maximum(jnp.abs(a).max(), 1e-30)
            jax.debug.callback(remember, jnp.abs(a - b).max() / most)


def _gather_all(now: Tracing, leaves: Sequence[Any], cuts: Sequence[int | None]) -> list[Any]:
    """The layer's operands with whole weights; inside of `jax.shard_map`."""
    full = list(leaves)
    groups: dict[Any, list[int]] = {}
    for at, cut in enumerate(cuts):
        if cut is not None:
            alone = leaves[at].nbytes * now.axes.shards >= _ALONE_BYTES
            groups.setdefault((leaves[at].dtype, at if alone else None), []).append(at)
    for (_, alone), places in groups.items():
        slices = [leaves[at] for at in places]
        if alone is not None:
            full[alone] = reduced_gather(slices[0], now.axes.shard, cuts[alone] or 0, now.reduce)
            continue
        packed = jnp.concatenate([x.reshape(-1) for x in slices])[None]
        rows = reduced_gather(packed, now.axes.shard, 0, now.reduce)
        start = 0
        for at, x in zip(places, slices, strict=True):
            dim = cuts[at] or 0
            pieces = rows[:, start : start + x.size].reshape(-1, *x.shape)
            shape = (*x.shape[:dim], -1, *x.shape[dim + 1 :])
            full[at] = jnp.moveaxis(pieces, 0, dim).reshape(shape)
            start += x.size
    return full


def reduced_gather(x: Array, axis: str, dim: int, reduce: Any) -> Array:
    """The whole of ``x``, cut along ``dim``; its gradient is summed in the dtype ``reduce``."""
    if reduce is None or reduce == x.dtype:
        return lax.all_gather(x, axis, axis=dim, tiled=True)
    return _gather_narrow(x, axis, dim, reduce)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather_narrow(x: Array, axis: str, dim: int, reduce: Any) -> Array:
    return lax.all_gather(x, axis, axis=dim, tiled=True)


def _gather_backward(axis: str, dim: int, reduce: Any, _: None, grad: Array) -> tuple[Array]:
    summed = lax.psum_scatter(grad.astype(reduce), axis, scatter_dimension=dim, tiled=True)
    return (summed.astype(grad.dtype),)


_gather_narrow.defvjp(lambda x, *args: (_gather_narrow(x, *args), None), _gather_backward)


def _dim_of_examples(own: Sequence[int], twice: Sequence[int], factor: int) -> int:
    differ = [dim for dim, (a, b) in enumerate(zip(own, twice, strict=True)) if a != b]
    if len(differ) != 1 or twice[differ[0]] != factor * own[differ[0]]:
        raise NotSupportedError(
            f"a result {tuple(own)} has no dimension of examples: a sum or a mean over them "
            "belongs outside of gathered"
        )
    return differ[0]


def _jaxprs_in(eqn: Any) -> list[Any]:
    """The jaxprs among the parameters of an operation, without their constants."""
    parts = [x for value in eqn.params.values()
             for x in (value if isinstance(value, tuple | list) else (value,))]  # fmt: skip
    inner = [getattr(x, "jaxpr", x) for x in parts]
    return [x for x in inner if hasattr(x, "eqns")]


def _refuse_shared_draws(jaxpr: Any) -> None:
    """Raise for random numbers that are drawn for all examples from one key."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "random_bits" and not eqn.invars[0].aval.shape:
            raise NotSupportedError(
                "it draws random numbers of all examples from one key: give a key for each example"
            )
        for inner in _jaxprs_in(eqn):
            _refuse_shared_draws(inner)


def _stacked(items: list[Any], listed: bool) -> tuple[Any, list[Any], Callable[[Any], Any]]:
    """The graph of equal modules, their arrays stacked, and how a tree is made of its own."""
    graph, first = split_module(items[0])
    structure: Any = jax.tree.structure(first)
    arrays, rebuild = split_arrays(first)
    rows = [arrays]
    for number, item in enumerate(items[1:], 1):
        other, tree = split_module(item)
        differ = "in structure or in what is no array"
        if other == graph and jax.tree.structure(tree) == structure:
            pairs = zip(jax.tree.leaves_with_path(first), jax.tree.leaves(tree), strict=True)
            kinds = ((path, _kind(a), _kind(b)) for (path, a), b in pairs)
            differ = next((f"in {path_name(path)}" for path, a, b in kinds if a != b), "")
        if differ:
            raise ConfigurationError(
                f"scan_layers: blocks 0 and {number} differ {differ}; layers that differ go "
                "through gathered(block)(x), one by one"
            )
        rows.append(split_arrays(tree)[0])
    return graph, [jnp.stack(row) for row in zip(*rows, strict=True)] if listed else arrays, rebuild


def _kind(x: Any) -> Any:
    return (x.shape, x.dtype) if is_array(x) else [x]


AROUND_LOOP = "gathered(layer)(weights, x) around the loop"
"""The call for weights that every turn of a loop uses: XLA sums their gradients in each."""

_CALLS = {
    "gather": "embed(table, tokens)",
    "conv_general_dilated": "gathered(layer)(weights, x)",
    "dot_general": "gathered(layer)(weights, x), or of a head cross_entropy(hidden, head, targets)",
    "ragged_dot_general": "gathered(layer)(weights, x)",
    "while": AROUND_LOOP,
}


def used_outside(jaxpr: Any, names: Sequence[str]) -> dict[str, str]:
    """Name the arrays of ``names``, the first operands, that XLA gathers, with the call to write.

    A weight stays itself through operations on it alone, as casts, slices and transposes.
    """
    outside: dict[str, str] = {}
    _walk(jaxpr, dict(zip(jaxpr.invars, names, strict=False)), outside)
    return outside


def _constants_of(scan: Any, body: Any) -> int:
    """Count a scan's first operands, neither carried nor cut; its parameters differ by version."""
    inside, outside = (body.invars, body.outvars), (scan.invars, scan.outvars)
    whole = [
        sum(a.aval.ndim == b.aval.ndim for a, b in zip(*both, strict=True))
        for both in zip(inside, outside, strict=True)
    ]
    return whole[0] - whole[1]


def _walk(jaxpr: Any, named: dict[Any, str], outside: dict[str, str]) -> list[str | None]:
    """Go through a jaxpr whose variables ``named`` are weights; the names of its results."""

    def name(atom: Any) -> str | None:
        return None if hasattr(atom, "val") else named.get(atom)

    for eqn in jaxpr.eqns:
        weights = [name(atom) for atom in eqn.invars]
        kind = eqn.primitive.name
        if not any(weights) or kind in ("shard_map", "sharding_constraint"):
            continue
        results: Sequence[str | None] = []
        if kind in _CALLS:
            outside.update((each, _CALLS[kind]) for each in weights if each)
        elif inner := _jaxprs_in(eqn):
            for one in inner:  # what chooses a branch stands before its operands
                theirs = weights[max(0, len(weights) - len(one.invars)) :]
                pairs = zip(one.invars, theirs, strict=False)
                results = _walk(one, {a: b for a, b in pairs if b}, outside)
            constants = weights[: _constants_of(eqn, inner[0])] if kind == "scan" else ()
            outside.update((each, AROUND_LOOP) for each in constants if each in outside)
        elif not any(x.aval.shape for x in eqn.invars if not name(x)):
            results = [next(filter(None, weights))] * len(eqn.outvars)
        named.update((x, n) for x, n in zip(eqn.outvars, results, strict=False) if n)
    return [name(atom) for atom in jaxpr.outvars]
