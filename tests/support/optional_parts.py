# SPDX-License-Identifier: Apache-2.0
"""A model of which ranks run different parts, trained in one process and by ranks."""

import torch
from support.beside import grads_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from fullshard.core.errors import ConfigurationError
from fullshard.testing import LocalWorld
from fullshard.torch import FullyShardedDataParallel, fully_shard, mark_optional, using
from fullshard.wrap import ModuleWrapPolicy

PARTS = ("eye", "ear", "hand")


class Part(nn.Module):
    """A tower of two layers, each a unit."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 5)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def draw(model, seed):
    """Fill a model with values of its own: ranks are threads."""
    values = torch.Generator().manual_seed(seed)
    for param in model.double().parameters():
        nn.init.uniform_(param, -0.5, 0.5, generator=values)


class Model(nn.Module):
    """Text through two blocks, before, between and behind which parts come in."""

    def __init__(self, again=False, drawn=True):
        super().__init__()
        self.embed = nn.Linear(3, 5)
        self.eye, self.ear, self.hand = Part(), Part(), Part()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.again = again  # blocks are recomputed in backward
        if drawn:
            draw(self, seed=7)

    def forward(self, text, used):
        """``used`` gives for each part how often it runs, on inputs made from the text.

        Less than 0: so many times without gradients.
        """
        x = self.embed(text)
        for name, block in zip(PARTS, [*self.blocks, None], strict=True):
            runs = used.get(name, 0)
            for _ in range(abs(runs)):
                with torch.set_grad_enabled(runs > 0 and torch.is_grad_enabled()):
                    added = getattr(self, name)(torch.cat([text, text[:, :2]], dim=1))
                x = x + added
            if block is not None:
                run = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
                x = torch.tanh(run)
        return x


def sharded(
    comm, door, again=False, mark=True, drawn=True, mean_over="ranks", embed=True, **options
):
    """The model with a unit for each layer, part and block; ``options`` are the function's."""
    model = Model(again, drawn)
    if door == "wrapper":
        policy = ModuleWrapPolicy({nn.Linear, Part})
        wrapped = FullyShardedDataParallel(model, comm, auto_wrap_policy=policy)
        mark_optional(*(getattr(wrapped, name) for name in PARTS), mean_over=mean_over)
        return wrapped
    for part in (model.eye, model.ear, model.hand):
        for layer in (part.first, part.second, part):
            fully_shard(layer, mesh=comm, **options)
    first = (model.embed,) if embed else ()
    for unit in (*first, *model.blocks, model):
        fully_shard(unit, mesh=comm, **options)
    if mark:
        mark_optional(model.eye, model.ear, model.hand, mean_over=mean_over)
    return model


class Recomputing(Model):
    """Parts are recomputed as a whole: by a call of their module, or of a function around."""

    function = staticmethod(lambda part: part)
    frozen = False  # but for the parts

    def forward(self, text, used):
        x = self.embed(text)
        for name, block in zip(PARTS, [*self.blocks, None], strict=True):
            part = self.function(getattr(self, name))
            for _ in range(used.get(name, 0)):
                seen = torch.cat([text, text[:, :2]], dim=1)
                x = x + checkpoint(part, seen, use_reentrant=False).tanh()
            x = x if block is None else torch.tanh(block(x))
        return x

    def freeze(self):
        for name, param in self.named_parameters():
            param.requires_grad_(name.startswith(PARTS))
        return self


def as_recomputing(comm, frozen=False, **options):
    """The model of `sharded`, with parts that are recomputed."""
    model = sharded(comm, "fully_shard", **options)
    model.__class__ = type("FSDPRecomputing", (type(model).__mro__[1], Recomputing), {})
    return model.freeze() if frozen else model


def texts(ranks, batch):
    values = torch.Generator().manual_seed(100 + batch)
    return torch.randn(ranks, 2, 3, dtype=torch.float64, generator=values)


def clean(name):
    return name.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", "")


def compare(history, expected):
    """Assert that gradients are those of one process, and None where that has none."""
    torch.testing.assert_close(history, expected, rtol=0, atol=1e-12)


def update(model, optimizer):
    """The gradients by name, whole, of before the step."""
    grads = {clean(name): grad for name, grad in grads_of(model).items()}
    optimizer.step()
    optimizer.zero_grad()
    return grads


def add_gradients(model, loss, weights):
    """Run backward, with the gradients of parts in ``weights`` counted so many times."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    names, params = zip(*trained, strict=True)
    grads = (None,) * len(params)
    if loss.requires_grad:
        grads = torch.autograd.grad(loss, params, allow_unused=True)
    for name, param, grad in zip(names, params, grads, strict=True):
        if grad is not None:
            grad = grad * weights.get(name.partition(".")[0], 1)
            param.grad = grad if param.grad is None else param.grad + grad


def of_one_process(ranks, steps, model=None, mean_over="ranks"):
    """Return the gradients that `train` has to give, trained in one process."""
    model = Model() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    history = []
    for number, patterns in enumerate(steps):
        for batch, pattern in enumerate(patterns):
            inputs = texts(ranks, 10 * number + batch)
            losses = [model(inputs[r], pattern[r]).square().mean() for r in range(ranks)]
            weights = {}
            if mean_over == "users":
                users = {part: sum(u.get(part, 0) > 0 for u in pattern) for part in PARTS}
                weights = {part: ranks / count for part, count in users.items() if count}
            add_gradients(model, sum(losses) / ranks, weights)
        history.append(update(model, optimizer))
    return history


def train(model, rank, ranks, steps, no_sync=False, announce=()):
    """The gradients of each step on one rank; ``steps`` has for each micro-batch what ranks use.

    The ranks in ``announce`` say beforehand how often they run each part.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    history = []
    for number, patterns in enumerate(steps):
        for batch, pattern in enumerate(patterns):
            inputs = texts(ranks, 10 * number + batch)[rank]
            if no_sync:
                model.set_requires_gradient_sync(batch == len(patterns) - 1)
            runs = {}
            if rank in announce:
                used = pattern[rank]
                runs = dict.fromkeys(PARTS, 0) | used if isinstance(used, dict) else announced(used)
            with using(model, **runs):
                loss = model(inputs, pattern[rank]).square().mean()
            loss.backward()
        history.append(update(model, optimizer))
    return history


def check(ranks, steps, shard, model=None, mean_over="ranks", **how):
    """Ranks that train what ``shard(comm)`` gives have the gradients of one process."""

    def body(comm):
        return train(shard(comm), comm.rank, ranks, steps, **how)

    expected = of_one_process(ranks, steps, model, mean_over)
    for history in LocalWorld(ranks).run(body):
        compare(history, expected)


def check_gradients(ranks, backward, shard, *models):
    """Gradients after ``backward(*models, rank)`` on ranks are means of those of one process.

    ``shard(comm)`` gives their models, or one; ``models`` are those of one process.
    """

    def body(comm):
        sharded = shard(comm)
        sharded = sharded if isinstance(sharded, list) else [sharded]
        backward(*sharded, comm.rank)
        return [update(each, torch.optim.SGD(each.parameters(), lr=0.1)) for each in sharded]

    models = models or (Model(),)
    for rank in range(ranks):
        backward(*models, rank)
    expected = [
        {name: None if grad is None else grad / ranks for name, grad in grads_of(each).items()}
        for each in models
    ]
    for history in LocalWorld(ranks).run(body):
        compare(history, expected)


def patterns(ranks, seed, most=1, least=0):
    """For each rank how often it runs each part, drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(least, most + 1, (ranks, len(PARTS)), generator=generator).tolist()
    return [dict(zip(PARTS, row, strict=True)) for row in drawn]


class Expert(nn.Linear):
    pass


class Block(nn.Module):
    """Experts between two layers; their order and number are those of ``route``."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)
        self.experts = nn.ModuleList(Expert(4, 4) for _ in range(3))

    def forward(self, x, route):
        x = torch.tanh(self.before(x))
        return x + self.after(sum((torch.tanh(self.experts[e](x)) for e in route), x))


def announced(routes):
    """Return the arguments of `using` for a rank's ``routes``."""
    return {
        f"blocks.{block}.experts.{expert}": expert in route
        for block, route in enumerate(routes)
        for expert in range(3)
    }


class MixtureOfExperts(nn.Module):
    """Two blocks, with experts of their own or ``shared`` ones, recomputed if ``again``."""

    def __init__(self, again, shared, drawn=True):
        super().__init__()
        self.embed, self.blocks = nn.Linear(3, 4), nn.ModuleList(Block() for _ in range(2))
        if shared:
            self.blocks[1].experts = self.blocks[0].experts
        self.again = again
        if drawn:
            draw(self, seed=3)

    def forward(self, text, routes):
        x = self.embed(text)
        for block, route in zip(self.blocks, routes, strict=True):
            again = self.again
            x = checkpoint(block, x, route, use_reentrant=False) if again else block(x, route)
        return x

    def shard(self, mesh, **options):
        for kind in (Expert, nn.Linear, Block):
            for module in self.modules():
                if type(module) is kind:
                    fully_shard(module, mesh=mesh, optional=kind is Expert, **options)
        return fully_shard(self, mesh=mesh, **options)


class Residual(Block):
    """Experts decide what a rank saves for backward: nothing stands behind them."""

    def forward(self, x, route):
        x = torch.tanh(self.before(x)) if self.saves else x
        return x + sum((self.experts[e](x) for e in route), x)


class Residuals(MixtureOfExperts):
    """Blocks recomputed each by a checkpoint, or all by one."""

    def __init__(self, saves, together, drawn=True):
        super().__init__(again=True, shared=False, drawn=drawn)
        self.together = together
        for block in self.blocks:
            block.__class__, block.saves = Residual, saves

    def forward(self, text, routes):
        if not self.together:
            return super().forward(text, routes)

        def run(x):
            for block, route in zip(self.blocks, routes, strict=True):
                x = block(x, route)
            return x

        return checkpoint(run, self.embed(text), use_reentrant=False)

    def shard(self, mesh, **options):
        for module in [*self.modules()][::-1]:
            if isinstance(module, (Residual, nn.Linear)):
                fully_shard(module, mesh=mesh, optional=isinstance(module, Expert), **options)
        return fully_shard(self, mesh=mesh, **options)


def routes(ranks, seed):
    """For each rank and block some experts, in some order."""
    generator = torch.Generator().manual_seed(seed)

    def some():
        most = int(torch.randint(0, 4, (1,), generator=generator))
        return torch.randperm(3, generator=generator).tolist()[:most]

    return [[some(), some()] for _ in range(ranks)]


def mark_differently(comm):
    model = sharded(comm, "fully_shard", mark=False)
    mark_optional(*((model.eye, model.ear) if comm.rank else (model.eye,)))
    try:
        model(texts(2, 0)[comm.rank], {})
    except ConfigurationError as error:
        return str(error)
