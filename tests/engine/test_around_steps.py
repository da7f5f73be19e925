# SPDX-License-Identifier: Apache-2.0
"""What users do between, in and around steps: right, or an error that names it."""

import importlib

import pytest
import torch
from support.beside import DOORS, grads_of, grid, params_of, shard
from support.models import Made, seeded
from support.threads import on_ranks
from torch import nn
from torch.func import functional_call

from fullshard.core.errors import ConfigurationError, NotSupportedError, UsageError
from fullshard.testing import LocalWorld
from fullshard.torch import (
    FullyShardedDataParallel,
    ShardingStrategy,
    fully_shard,
    keep_for_double_backward,
)

pytestmark = pytest.mark.usefixtures("checked_values")

LAYERS = (nn.Linear,)
X = torch.arange(6.0, dtype=torch.float64).view(2, 3) / 6


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def train_beside(model, plain, steps, backward, **options):
    """Train both by SGD, ``backward(model, step)`` giving the gradients, which are equal."""
    options = {"lr": 0.1, **options}
    optimizers = [torch.optim.SGD(each.parameters(), **options) for each in (model, plain)]
    for step in range(steps):
        backward(model, step)
        backward(plain, step)
        assert_grads(model, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def squared(model, step):
    model(X).square().sum().backward()


def assert_grads(model, plain):
    torch.testing.assert_close(grads_of(model), grads_of(plain))


# ---- what a user puts in a parameter's place ------------------------------------------------


@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_functional_call_with_full_tensors(comm, door):
    model, plain = shard(seeded(net), comm, door, LAYERS), seeded(net, 1)
    given = {n: p.detach().clone().requires_grad_() for n, p in plain.named_parameters()}
    output = functional_call(model, given, (X,))
    output.sum().backward()
    plain(X).sum().backward()
    torch.testing.assert_close({n: p.grad for n, p in given.items()}, grads_of(plain))
    model.zero_grad()
    reference = seeded(net)
    model(X).sum().backward()  # its own parameters are back
    reference(X).sum().backward()
    assert_grads(model, reference)


@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_values_are_assigned_after_functional_call(comm, door):
    """Values that were lent go back: modules show parameters, not what was assigned."""
    model, plain = shard(seeded(net), comm, door, LAYERS), seeded(net, 1)
    lent = {name: torch.zeros_like(value) for name, value in plain.named_parameters()}
    functional_call(model, lent, (X,))
    model.load_state_dict(plain.state_dict(), assign=True)
    assert all(type(param) is not nn.Parameter for param in model.parameters())
    model(X).sum().backward()
    plain(X).sum().backward()
    assert_grads(model, plain)


class Keeping(nn.Linear):
    def forward(self, x):
        self.kept = super().forward(x)
        return self.kept


@pytest.mark.parametrize("training", [True, False])
@on_ranks(2)
def test_outputs_are_not_copied(comm, training):
    model = fully_shard(Keeping(3, 3), mesh=comm, check_values=False)
    with torch.set_grad_enabled(training):
        assert model(torch.ones(1, 3)) is model.kept


class Masked(nn.Linear):
    def forward(self, x, mask):
        self.seen = x, mask
        return super().forward(x) * mask


@on_ranks(2)
def test_units_that_share_an_input_have_the_other_one_as_it_is(comm):
    class Two(nn.Sequential):
        def forward(self, x, mask):
            return sum(unit(x, mask) for unit in self)

    units = [seeded(lambda: Masked(3, 3)) for _ in range(2)]
    for unit in units:
        fully_shard(unit, mesh=comm)
    x, mask = torch.ones(1, 3), torch.ones(1, 3)
    fully_shard(Two(*units), mesh=comm)(x.requires_grad_(), mask).sum().backward()
    assert units[1].seen[0] is not x  # a view, whose gradient is that of its unit alone
    assert units[1].seen[1] is mask


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    "replace",
    [
        lambda layer: setattr(layer, "weight", nn.Parameter(torch.ones(4, 3).double())),
        lambda layer: setattr(layer, "bias", None),
        lambda layer: layer.__delattr__("bias"),
        lambda layer: nn.utils.parametrizations.weight_norm(layer),
    ],
    ids=["replaced", "none", "deleted", "parametrized"],
)
@on_ranks(2)
def test_what_is_replaced_is_named(comm, door, replace):
    model = shard(seeded(net), comm, door, LAYERS)
    if comm.rank == 2:
        return
    model(X).sum().backward()
    try:
        replace(model[0].module if door == "wrapper" else model[0])
    except (RuntimeError, NotImplementedError):
        return  # torch or a rule has refused it by itself
    with pytest.raises(UsageError, match=r"'0\..*after it was sharded"):
        model(X)


@on_ranks(2)
def test_functional_call_with_spans_and_transforms_are_named(comm):
    model = shard(seeded(net), comm, units=LAYERS)
    with pytest.raises(UsageError, match="full_tensor"):
        functional_call(model, {"0.weight": model[0].weight * 2}, (X,))
    with pytest.raises(UsageError, match="of shape"):
        functional_call(model, {"0.weight": torch.ones(2, 2)}, (X,))
    full = {name: param.detach().full_tensor() for name, param in model.named_parameters()}
    with pytest.raises(NotSupportedError, match=r"torch\.func\.grad"):
        torch.func.grad(lambda values: functional_call(model, values, (X,)).sum())(full)
    model(X).sum().backward()


# ---- containers that blocks write to --------------------------------------------------------


class Writer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x, losses, seen=None):
        y = self.layer(x).tanh()
        losses["all"].append(y.square().mean())
        seen.append(x)
        losses["count"] = losses.get("count", 0) + 1
        return y


class Writers(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Writer() for _ in range(3))

    def forward(self, x):
        losses, seen = {"all": []}, [x]
        for block in self.blocks:
            x = block(x, losses, seen=seen)
        assert len(seen) == 4
        return x.sum() + sum(losses["all"]) * losses["count"]


@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_what_blocks_append_is_kept(comm, door):
    model = shard(seeded(Writers).double(), comm, door, units=(Writer,))
    plain = seeded(Writers).double()
    for _ in range(2):
        loss, expected = model(X), plain(X)
        torch.testing.assert_close(loss, expected)
        loss.backward()
        expected.backward()
    assert_grads(model, plain)


# ---- stale references, writes in forward -------------------------------------------------


class Listing(nn.Module):
    """Uses its parameters by lists and dicts that it has made of them."""

    def __init__(self):
        super().__init__()
        self.layer, self.other = nn.Linear(3, 3), nn.Linear(3, 3)
        self.weights = [self.layer.weight, (1, 2), {"deep": self.other.weight}]

    def forward(self, x):
        first, _, named = self.weights
        return self.layer(x) @ first + self.other.bias @ named["deep"]


def by_attribute(plain):
    weights = plain.weights
    weights[0], weights[2]["deep"] = plain.layer.weight, plain.other.weight
    return plain


@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_lists_of_weights_follow_what_modules_show(comm, door):
    model, plain = seeded(Listing).double(), by_attribute(seeded(Listing).double())
    model = shard(model, comm, door)
    inner = model.module if door == "wrapper" else model

    def backward(each, step):
        if step > 1:  # thawing lays parameters out anew
            (inner if each is model else each).layer.bias.requires_grad_(step > 2)
        each(X).square().sum().backward()

    with torch.no_grad():
        torch.testing.assert_close(model(X), plain(X))
    train_beside(model, plain, 4, backward, weight_decay=0.1)


class Stale(nn.Module):
    """Has a reference that nobody can find: in a closure."""

    def __init__(self, trained=True):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        weight = self.layer.weight.requires_grad_(trained)
        self.multiply = lambda x: x @ weight
        self.weigh = lambda: weight

    def forward(self, x):
        return self.multiply(x)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@on_ranks(2)
def test_a_replaced_original_in_forward_is_named(comm, door, trained, grad):
    model = shard(seeded(lambda: Stale(trained)).double(), comm, door)
    inner = model.module if door == "wrapper" else model
    with (
        torch.set_grad_enabled(grad),
        pytest.raises(UsageError, match=r"parameter 'layer\.weight' that was taken before"),
    ):
        model(X)
    weight = inner.weigh()  # outside forward it can be looked at, and compared
    assert tuple(weight.shape) == (3, 3)
    assert torch.equal(weight, inner.layer.weight.full_tensor())


@on_ranks(2)
def test_a_gradient_of_a_replaced_original_is_named(comm):
    model = seeded(Stale).double()
    fully_shard(model, mesh=comm)
    with pytest.raises(UsageError, match=r"sharded as 'layer\.weight'"):
        model.weigh().square().sum().backward()


@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU])
@on_ranks(1)
def test_recurrent_layers_leave_full_parameters_where_they_are(comm, cls):
    model, plain = seeded(lambda: cls(3, 3).double()), seeded(lambda: cls(3, 3).double())
    model = fully_shard(model, mesh=comm)
    moved = []  # as on CUDA, where forward flattens what has changed
    cls.flatten_parameters, kept = lambda self: moved.append(self), cls.flatten_parameters
    try:
        for _ in range(2):
            model(X)[0].square().sum().backward()
            plain(X)[0].square().sum().backward()
            assert_grads(model, plain)
    finally:
        cls.flatten_parameters = kept
    assert not moved


@on_ranks(2)
def test_a_buffer_in_the_memory_of_a_parameter_is_named(comm):
    model = seeded(lambda: nn.Linear(3, 3))
    model.register_buffer("copy", model.weight.data[1:])
    with pytest.raises(ConfigurationError, match=r"'copy' lies in the memory of .*'weight'"):
        fully_shard(model, mesh=comm)


class Writing(nn.Linear):
    how, count = "", 0

    def forward(self, x):
        self.count += 1
        if self.how == "data":
            self.weight.data.clamp_(-0.1, 0.1)
        if self.how == "later" and self.count == 2:
            with torch.no_grad():
                self.weight.mul_(0.5)
        return super().forward(x)


@pytest.mark.parametrize(("how", "first_error"), [("data", 0), ("later", 1), ("", 9)])
@on_ranks(2)
def test_writes_in_forward_are_named(comm, how, first_error):
    inner = seeded(lambda: Writing(3, 3))
    inner.how = how
    model = FullyShardedDataParallel(nn.Sequential(inner), comm)
    for step in range(3):
        if step < first_error:
            model(X.float()).sum().backward()
            continue
        with pytest.raises(UsageError, match=r"forward has written to '0\.weight'"):
            model(X.float())
        return


@pytest.mark.parametrize("cls", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_max_norm_is_refused_by_name(comm, cls, door):
    model = nn.Sequential(seeded(lambda: cls(4, 3, max_norm=1.0)))
    with pytest.raises(NotSupportedError, match="'0' has max_norm"):
        shard(model, comm, door, LAYERS)
    assert type(model[0].weight) is nn.Parameter


# ---- unusual ways to get gradients ----------------------------------------------------------


@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_sharded_parameters_as_inputs_of_autograd_are_named(comm, door):
    model = shard(seeded(net), comm, door, LAYERS)
    loss = model(X).sum()
    with pytest.raises(UsageError, match=r"autograd\.grad"):
        torch.autograd.grad(loss, model.parameters())
    with pytest.raises(UsageError, match="backward"):
        loss.backward(inputs=list(model.parameters()))
    plain = seeded(net)
    plain(X).sum().backward()
    loss.backward()
    assert_grads(model, plain)


@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_hooks_from_before_sharding_get_the_sharded_gradient(comm, door):
    model, seen = seeded(net), []
    handle = model[0].weight.register_hook(lambda grad: grad * 2)
    model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(tuple(p.shape)))
    model, plain = shard(model, comm, door, LAYERS), seeded(net)
    plain[0].weight.register_hook(lambda grad: grad * 2)
    model(X).sum().backward()
    plain(X).sum().backward()
    assert_grads(model, plain)
    assert seen == [(4, 3)]
    handle.remove()
    model.zero_grad()
    model(X).sum().backward()
    torch.testing.assert_close(grads_of(model)["0.weight"] * 2, plain[0].weight.grad)


@pytest.mark.parametrize(
    ("door", "before"), [*((door, False) for door in DOORS), ("wrapper", True)]
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # as it is imported
@on_ranks(2)
def test_torchs_optimizers_in_backward_step_with_the_sharded_gradient(comm, door, before):
    module = importlib.import_module("torch.distributed.optim")
    model, plain = seeded(net), seeded(net)
    if not before:
        model = shard(model, comm, door, LAYERS)
    for each in (model, plain):
        module._apply_optimizer_in_backward(torch.optim.SGD, each.parameters(), {"lr": 0.1})
    if before:
        model = shard(model, comm, door, LAYERS, use_orig_params=True)
    for step in range(3):
        squared(model, step)
        squared(plain, step)
        assert all(param.grad is None for param in model.parameters())
        torch.testing.assert_close(params_of(model), params_of(plain))


@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_a_step_between_two_backwards_is_named(comm, door):
    model = shard(seeded(net), comm, door, LAYERS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(X).sum()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)  # that is fine
    optimizer.step()
    with pytest.raises(UsageError, match="changed between its forward and this backward"):
        loss.backward()
    model(X).sum().backward()


@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_a_failed_backward_run_again_is_named(comm, door):
    model, fails = shard(seeded(net), comm, door, LAYERS), [True]

    def fail(_grad):
        if fails[0]:
            raise ValueError("once")

    inputs = X.clone().requires_grad_() * 1
    inputs.register_hook(fail)
    loss = model(inputs).sum()
    with pytest.raises(ValueError, match="once"):
        loss.backward(retain_graph=True)
    fails[0] = False
    with pytest.raises(UsageError, match="again after a backward that failed"):
        loss.backward()
    model.zero_grad()
    plain = seeded(net)
    model(X).sum().backward()
    plain(X).sum().backward()
    assert_grads(model, plain)


class Branches(nn.Module):
    """Goes through two layers, then through some of others that are one unit."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.branches = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.fails = False

    def forward(self, x, chosen):
        x = self.first(x)
        if self.fails:
            x.register_hook(self._fail)
        x = self.second(x)
        return sum(self.branches[number](x) for number in chosen)

    def _fail(self, _grad):
        raise ValueError("once")


@on_ranks(2)
def test_what_a_failed_backward_left_out_is_not_taken_for_used_by_the_next(comm):
    """Zeros of what nobody uses are taken away again: weight decay would change it."""
    model = seeded(Branches).double()
    fully_shard(list(model.branches), mesh=comm)
    for module in (model.first, model.second, model):
        fully_shard(module, mesh=comm)
    model.fails = True
    with pytest.raises(ValueError, match="once"):
        model(X, (0, 1)).sum().backward()
    model.fails = False
    model.zero_grad()
    model(X, (0, 2)).sum().backward()
    assert [layer.weight.grad is not None for layer in model.branches] == [True, False, True]


@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_modules_added_after_sharding_are_named(comm, door):
    model = shard(seeded(net), comm, door, LAYERS)
    inner = model.module if door == "wrapper" else model
    model(X).sum().backward()
    inner[1] = nn.Linear(4, 4).double().requires_grad_(False)  # frozen: nothing to reduce
    model(X).sum().backward()
    inner[1] = nn.Linear(4, 4).double()
    with pytest.raises(UsageError, match=r"'1\.weight', '1\.bias': added"):
        model(X)
    inner[1] = nn.Tanh()
    model(X).sum().backward()
    inner[1].register_parameter("scale", nn.Parameter(torch.ones(1)))
    with pytest.raises(UsageError, match=r"'1\.scale': added"):
        model(X)


def thaw_what_was_added_frozen(model):
    model.add_module("extra", nn.Linear(3, 3).double().requires_grad_(False))
    yield
    model.extra.requires_grad_(True)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("align", ["row", "element"])
@pytest.mark.parametrize("stepped", [False, True], ids=["before the first step", "between steps"])
@pytest.mark.parametrize(
    "add",
    [
        lambda model: model.add_module("extra", nn.Linear(3, 3).double()),
        lambda model: model[1].add_module("extra", nn.Linear(4, 4).double()),
        lambda model: setattr(model[2], "bias", nn.Parameter(torch.ones(3).double())),
        thaw_what_was_added_frozen,
    ],
    ids=["child", "child of a leaf", "in the place of None", "frozen, then trained"],
)
@on_ranks(2)
def test_whatever_is_trained_and_was_added_after_sharding_is_named(comm, door, align, stepped, add):
    plain = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3, False)))
    plain.double().register_parameter("left", nn.Parameter(torch.ones(2)))
    ignored = [plain.left]
    if door == "wrapper":
        model = FullyShardedDataParallel(plain, comm, ignored_states=ignored, align=align)
    else:
        model = fully_shard(plain, mesh=comm, ignored_params=set(ignored), align=align)
    if stepped:
        model(X).sum().backward()
    moments = add(plain)
    if moments is not None:
        next(moments)
        model(X).sum().backward()
        next(moments, None)
    with pytest.raises(UsageError, match=r"'(extra|1\.extra|2)\..*: added to the model"):
        model(X)


@pytest.mark.parametrize("world", [2, 3])
@on_ranks("world")
def test_a_rank_that_skips_a_step_is_named(comm, world):
    model = shard(seeded(net), comm, units=LAYERS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(X).sum().backward()
    if comm.rank != 1:
        optimizer.step()
    with pytest.raises(UsageError, match="between 0 and 1 on the ranks"):
        model(X).sum().backward()


# ---- shared modules, groups in part -----------------------------------------------------


class WithShared(Made):
    pass


def sharing():
    shared = nn.Linear(3, 3)
    first, second = (
        WithShared(lambda m, x: m.shared(m.own(x)).tanh(), own=nn.Linear(3, 3), shared=shared)
        for _ in range(2)
    )
    return nn.Sequential(first, second, nn.Linear(3, 2)).double()


@pytest.mark.parametrize("door", [*DOORS, "by hand"])
@on_ranks(2)
def test_a_module_of_several_units_equals_one_process(comm, door):
    model, plain = seeded(sharing), seeded(sharing)
    if door == "by hand":
        for number in (0, 1):
            model[number] = FullyShardedDataParallel(model[number], comm)
        model = FullyShardedDataParallel(model, comm)
    else:
        model = shard(model, comm, door, units=(WithShared,))
    train_beside(model, plain, 3, squared)


@on_ranks(2)
def test_without_a_unit_around_all_uses_it_is_named(comm):
    model = seeded(sharing)
    fully_shard(model[0], mesh=comm)
    fully_shard(model[1], mesh=comm)
    model[0](X)
    with pytest.raises(UsageError, match=r"'shared\.weight'.*nearest module"):
        model[1](X)


def language():
    parts = {"embed": nn.Linear(3, 4), "norm": nn.LayerNorm(4), "head": nn.Linear(4, 5)}
    return Made(lambda m, x: m.norm(m.embed(x)), **parts).double()


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("micro_batches", [1, 2])
@on_ranks(2)
def test_a_group_whose_modules_run_apart(comm, chunks, micro_batches):
    def step(model):
        for _ in range(micro_batches):
            hidden = model(X)
            cut = hidden.detach().requires_grad_()
            for chunk in cut.chunk(chunks):
                model.head(chunk).square().sum().backward()
            hidden.backward(cut.grad)

    model, plain = seeded(language), seeded(language)
    fully_shard(model.embed, mesh=comm)
    fully_shard([model.norm, model.head], mesh=comm)
    fully_shard(model, mesh=comm)
    train_beside(model, plain, 3, lambda each, _: step(each), lr=0.01)
    model.head(model(X)).sum().backward()  # in one graph
    plain.head(plain(X)).sum().backward()
    assert_grads(model, plain)


# ---- double backward ------------------------------------------------------------------------


def penalised(model):
    inputs = X.clone().requires_grad_()
    output = model(inputs).sum()
    (gradient,) = torch.autograd.grad(output, inputs, create_graph=True)
    return output.square() + gradient.square().sum()


@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_a_gradient_penalty_equals_one_process(comm, door):
    model, plain = shard(seeded(net), comm, door, LAYERS), seeded(net)
    keep_for_double_backward(model)
    train_beside(model, plain, 3, lambda model, step: penalised(model).backward())


@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_double_backward_of_units_that_are_freed_is_named(comm, door):
    model = shard(seeded(net), comm, door, LAYERS)
    with pytest.raises(NotSupportedError, match="keep_for_double_backward"):
        penalised(model)
    model(X).sum().backward()


class Featured(nn.Module):
    """Makes a tensor that the next block does not get, and computes with a bare parameter."""

    where = "nowhere"

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3)
        self.gain = nn.Parameter(torch.full((2, 3), 2.0))
        self.losses = {}

    def forward(self, x):
        feature = self.norm(self.first(x) * self.gain)
        if self.where == "attribute":
            self.losses["auxiliary"] = [feature.square().mean()]
        return self.last(feature)


def features_of(model):
    return [m for m in model.modules() if isinstance(m, Featured)]


def loss_of_features(model, where):
    """A loss of the first block's features; a hook takes them, or an attribute keeps them."""
    first, taken = features_of(model)[0], []
    handles = []
    if where == "hook":
        handles.append(first.norm.register_forward_hook(lambda m, args, out: taken.append(out)))
    if where == "input of a hook":
        handles.append(first.last.register_forward_hook(lambda m, args, out: taken.append(args[0])))
    output = model(X)
    for handle in handles:
        handle.remove()
    if where == "attribute":
        taken = first.losses["auxiliary"]
    return output, taken[0].square().sum()


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("where", ["hook", "input of a hook", "attribute"])
@on_ranks(2)
def test_losses_on_features_from_inside_a_unit_equal_one_process(comm, door, both, where):
    def blocks():
        return nn.Sequential(Featured(), Featured(), Featured()).double()

    model, plain = shard(seeded(blocks), comm, door, units=(Featured,)), seeded(blocks)
    for each in (model, plain):
        features_of(each)[0].where = where
    model(X).sum().backward()  # the hooks come after the first step
    model.zero_grad()
    for _ in range(2):
        for each in (model, plain):
            output, loss = loss_of_features(each, where)
            (loss + output.sum() if both else loss).backward()
        assert_grads(model, plain)


class Taken:
    x = None


class Hiding(Made):
    pass


def hiding_matrices():
    def run(m, x, taken):
        taken.x = m.last(m.first(x))
        return m.last(taken.x)

    return Hiding(run, first=nn.Linear(3, 3), last=nn.Linear(3, 3)).double()


def hiding_scales():
    """Products with bare parameters: kernels that read where no memory is."""

    def run(m, x, taken):
        taken.x = m.norm(x * m.scale) * m.scale
        return taken.x * m.scale

    return Hiding(run, scale=nn.Parameter(torch.ones(3)), norm=nn.LayerNorm(3)).double()


@pytest.mark.parametrize("kind", [hiding_matrices, hiding_scales])
@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_a_backward_into_a_unit_that_nobody_has_announced_is_named(comm, kind, door):
    model, taken = seeded(kind), Taken()
    if door == "wrapper":
        model = shard(nn.Sequential(model), comm, door, [Hiding]).module[0]
    else:
        fully_shard(model, mesh=comm, reshard_after_forward=True)
    model(X, taken)
    with pytest.raises(UsageError, match="from inside the unit"):
        taken.x.square().sum().backward()
    with torch.no_grad():
        model(X, taken)
    for _ in range(2):  # on demand, then by the record
        model.zero_grad()
        model(X, taken).square().sum().backward()
    plain = seeded(kind)
    plain(X, taken).square().sum().backward()
    assert_grads(model, plain)


# ---- gradients of unused parameters --------------------------------------------------------


def branches():
    def run(m, x, use_b):
        return m.b(m.a(x)) if use_b else m.a(x)

    return Made(run, **{name: nn.Linear(3, 3) for name in "abc"}).double()


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("world", [1, 2, 3])
@on_ranks("world")
def test_nobody_used_is_none_and_weight_decay_leaves_it_alone(comm, door, world):
    model, plain = shard(seeded(branches), comm, door, LAYERS), seeded(branches)

    def backward(model, step):
        model(X, step == 1).sum().backward()

    train_beside(model, plain, 4, backward, weight_decay=0.5, momentum=0.9)
    torch.testing.assert_close(params_of(model), params_of(plain))


@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_frozen_for_a_forward_without_gradients_before_backward(comm, door):
    """As PEFT does for a reference: its adapter trained for a moment, the other one frozen."""
    model, plain = shard(seeded(net), comm, door, LAYERS), seeded(net)

    def backward(model, step):
        loss = model(X).square().sum()
        model[0].requires_grad_(False)
        with torch.no_grad():
            aim = model(2 * X).sum()
        model[0].requires_grad_(True)
        (loss - aim).backward()

    train_beside(model, plain, 3, backward, momentum=0.9)
    torch.testing.assert_close(params_of(model), params_of(plain))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("trained", [True, False])
@on_ranks(2)
def test_requires_grad_changed_between_two_forwards_before_a_backward_is_named(comm, door, trained):
    plain = seeded(net)
    plain[2].requires_grad_(trained)
    model = shard(plain, comm, door, LAYERS)
    loss = model(X).sum()
    model[2].requires_grad_(not trained)
    other = model(2 * X).sum()
    with pytest.raises(UsageError, match="requires_grad of some of its parameters was changed"):
        loss.backward()
    with pytest.raises(UsageError, match="after a backward that failed"):
        other.backward()
    model(X).sum().backward()
    assert (grads_of(model)["2.bias"] is None) is trained


@on_ranks(2)
def test_what_nobody_used_behind_frozen_parameters_has_no_gradient(comm):
    model = seeded(branches)
    model.a.requires_grad_(False)
    model = shard(model, comm)
    model(X, use_b=True).sum().backward()
    assert [name for name, grad in grads_of(model).items() if grad is not None] == [
        "b.weight",
        "b.bias",
    ]


@on_ranks(2)
def test_a_unit_waits_for_the_gradients_of_all_its_inputs(comm):
    """The weight that the second one's needs is frozen, so no gradient of its own is waited for."""

    def of_two():
        return Made(lambda m, x, y: m.a(y) + m.b(x), a=nn.Linear(3, 3), b=nn.Linear(3, 3))

    plain = seeded(of_two).double()
    plain.a.requires_grad_(False)
    inputs = [torch.ones(2, 3, dtype=torch.double, requires_grad=True) for _ in range(2)]
    expected = torch.autograd.grad(plain(*inputs).square().sum(), inputs)
    shard(plain, comm)(*inputs).square().sum().backward()
    torch.testing.assert_close([each.grad for each in inputs], list(expected))


class Giving(nn.Module):
    """Returns its output with its weight, or a view of it, for somebody else to read."""

    def __init__(self, view):
        super().__init__()
        self.layer, self.view = nn.Linear(3, 3), view

    def forward(self, x):
        y = self.layer(x)
        weight = self.view(self.layer.weight)
        return (y, {"weight": [weight]}) if y.requires_grad else weight


class Reading(nn.Module):
    def __init__(self, view):
        super().__init__()
        self.giving, self.last = Giving(view), nn.Linear(3, 3)

    def forward(self, x):
        given = self.giving(x)
        if isinstance(given, tuple):
            return self.last(given[0]) * given[1]["weight"][0].sum()
        return self.last(x) * given.sum()


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("align", ["row", "element"])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "view",
    [lambda w: w, lambda w: w.t(), lambda w: w.detach(), lambda w: w.data[0], lambda w: w.view(-1)],
)
@on_ranks(2)
def test_weights_that_a_unit_returns_can_be_read_after_it_was_freed(comm, door, align, mode, view):
    model, plain = (
        seeded(lambda: Reading(view)).double(),
        seeded(lambda: Reading(view)).double(),
    )
    model = shard(model, comm, door, [Giving], align=align)
    with mode():
        ours, theirs = model(X), plain(X)
    torch.testing.assert_close(ours, theirs)
    if mode is torch.enable_grad:
        ours.sum().backward()
        theirs.sum().backward()
        assert_grads(model, plain)


# ---- inference mode, replicas ------------------------------------------------------------------


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("align", ["row", "element"])
@on_ranks(2)
def test_training_goes_on_after_inference_mode_has_seen_a_thawed_parameter(comm, door, align):
    model, plain = seeded(net), seeded(net)
    model[0].weight.requires_grad_(False)
    inner, model = model, shard(model, comm, door, align=align)
    model(X).sum().backward()
    model.zero_grad()
    inner[0].weight.requires_grad_(True)
    with torch.inference_mode():
        torch.testing.assert_close(model(X), plain(X))
        whole = params_of(model)
        model.load_state_dict(model.state_dict())
    torch.testing.assert_close(whole, params_of(plain))
    train_beside(model, plain, 2, squared)


@pytest.mark.parametrize("align", ["row", "element"])
@pytest.mark.parametrize("kind", ["NO_SHARD", "HYBRID_SHARD", "function"])
@pytest.mark.parametrize("alike", [True, False])
@on_ranks(4)
def test_replicas_that_ranks_initialise_differently_are_named(comm, align, kind, alike):
    model = seeded(net)
    pair = comm if kind == "NO_SHARD" else grid(comm)
    if kind == "function":
        model = fully_shard(model, mesh=pair, align=align)
    else:
        strategy = ShardingStrategy[kind]
        model = FullyShardedDataParallel(model, pair, strategy, align=align)
    seed = 0 if alike else comm.rank
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(generator=generator)
    if alike:
        model(X).sum().backward()
        return
    for _ in range(2):
        with pytest.raises(UsageError, match=r"replicas of '0\.weight'"):
            model(X)


def test_a_switch_lets_replicas_differ(monkeypatch):
    monkeypatch.setenv("FULLSHARD_CHECK_VALUES", "0")

    def body(comm):
        model = FullyShardedDataParallel(seeded(net), comm, ShardingStrategy.NO_SHARD)
        with torch.no_grad():
            model.module[0].bias.fill_(float(comm.rank))
        model(X).sum().backward()

    LocalWorld(2).run(body)
