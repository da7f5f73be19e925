# SPDX-License-Identifier: Apache-2.0
"""Things that people do to models in training; each works on a plain model, too."""

import contextlib
import copy
import random

import torch
from support.random_models import WIDTH, Node, run
from torch import nn
from torch.func import functional_call

BATCH = 6


class Interrupted(Exception):
    """Raised in the middle of something, as by a user's own code or Ctrl-C."""


def nodes_of(model):
    return [module for module in model.modules() if isinstance(module, Node)]


class Misuser:
    """Trains ``model`` for some steps, and does one of `DEEDS` in each.

    From `SEED_OF_CHANGES` on `CHANGES` of modules are half of what it does; from
    `SEED_OF_LAYOUTS` on new modules may be frozen, and ties may end.
    """

    def __init__(self, model, choose, seed):
        self.model, self.choose, self.seed = model, choose, seed
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        self.step = 0

    def train(self, steps):
        for self.step in range(steps):
            changes = self.seed >= SEED_OF_CHANGES and self.choose.random() < 0.5
            known = CHANGES + [untie] * (self.seed >= SEED_OF_LAYOUTS)
            deed = self.choose.choice(known if changes else DEEDS)
            deed(self)

    # ---- what a step is made of ----

    @property
    def inputs(self):
        generator = torch.Generator().manual_seed(1000 * self.seed + self.step)
        return torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)

    def loss(self, inputs=None):
        return self.model(self.inputs if inputs is None else inputs)["y"].square().mean()

    def backward(self, loss, **options):
        if loss.requires_grad:
            loss.backward(**options)

    def finish(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def some_node(self):
        nodes = nodes_of(self.model)
        return nodes[self.choose.randrange(len(nodes))]

    def new_node(self):
        node = Node(random.Random(self.seed), 0).double()
        generator = torch.Generator().manual_seed(self.seed)
        for param in node.parameters():
            param.data = torch.randn(param.shape, generator=generator, dtype=torch.float64)
        frozen = self.seed >= SEED_OF_LAYOUTS and self.choose.random() < 0.5
        return node.requires_grad_(not frozen)

    def some_site(self):
        sites = [(node, kind) for node in nodes_of(self.model) for kind in node.kinds]
        return sites[self.choose.randrange(len(sites))]


def plainly(it):
    it.backward(it.loss())
    it.finish()


def replace_a_parameter(it):
    node, kind = it.some_site()
    generator = torch.Generator().manual_seed(it.seed)
    old = getattr(node, kind)
    new = torch.randn(tuple(old.shape), generator=generator, dtype=torch.float64).to(old.dtype)
    setattr(node, kind, nn.Parameter(new))
    plainly(it)


def tie_again(it):
    (node, kind), (other, other_kind) = it.some_site(), it.some_site()
    if getattr(node, kind).shape == getattr(other, other_kind).shape:
        setattr(node, kind, getattr(other, other_kind))
    plainly(it)


def freeze_or_thaw(it):
    node, kind = it.some_site()
    param = getattr(node, kind)
    param.requires_grad_(not param.requires_grad)
    plainly(it)


def freeze_between_forward_and_backward(it):
    loss = it.loss()
    node, kind = it.some_site()
    param = getattr(node, kind)
    it.backward(loss)
    param.requires_grad_(not param.requires_grad)
    it.finish()


def call_a_part_directly(it):
    node = it.some_node()
    loss = it.loss() + node(it.inputs)["y"].square().mean()
    it.backward(loss)
    it.finish()


def call_a_part_first(it):
    node = it.some_node()
    it.backward(node(it.inputs)["y"].square().mean())
    it.backward(it.loss())
    it.finish()


def use_parameters_outside_forward(it):
    node = it.some_node()
    it.backward(it.loss() + node.own(it.inputs).square().mean())
    it.finish()


def backward_twice(it):
    loss = it.loss()
    it.backward(loss, retain_graph=True)
    it.backward(loss)
    it.finish()


def step_between_backwards(it):
    loss = it.loss()
    it.backward(loss, retain_graph=True)
    it.optimizer.step()
    it.backward(loss)
    it.finish()


def two_forwards_two_backwards(it):
    first, second = it.loss(), it.loss(it.inputs * 2)
    it.backward(first)
    it.backward(second)
    it.finish()


def gradients_of_inputs(it):
    inputs = it.inputs.requires_grad_()
    loss = it.loss(inputs)
    if loss.requires_grad:
        (gradient,) = torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True)
        loss = loss + (0.0 if gradient is None else gradient.detach().square().sum() * loss)
    it.backward(loss)
    it.finish()


def gradient_penalty(it):
    inputs = it.inputs.requires_grad_()
    loss = it.loss(inputs)
    if loss.requires_grad:
        (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True, allow_unused=True)
        loss = loss if gradient is None else loss + gradient.square().sum()
    it.backward(loss)
    it.finish()


def gradients_of_parameters(it):
    loss = it.loss()
    params = [param for param in it.model.parameters() if param.requires_grad]
    if loss.requires_grad and params:
        for param, grad in zip(
            params, torch.autograd.grad(loss, params, allow_unused=True), strict=True
        ):
            param.grad = grad
    it.finish()


def backward_into_some(it):
    loss = it.loss()
    params = [param for param in it.model.parameters() if param.requires_grad]
    if loss.requires_grad and params:
        loss.backward(inputs=params[:2])
    it.finish()


def call_with_other_values(it):
    modules = [module for _, module in it.model.named_modules(remove_duplicate=False)]
    if len(set(modules)) < len(modules):  # torch then leaves the other values in a plain model
        plainly(it)
        return
    values = {}
    for name, param in it.model.named_parameters():
        full = param.full_tensor().detach() if hasattr(param, "full_tensor") else param.detach()
        values[name] = (full.clone() * 0.5).requires_grad_()
    loss = functional_call(it.model, values, (it.inputs,))["y"].square().mean()
    it.backward(loss)
    plainly(it)


def state_dict_in_mid_step(it):
    loss = it.loss()
    state = copy.deepcopy(it.model.state_dict())  # a plain model's would follow its parameters
    it.backward(loss)
    it.finish()
    if it.choose.random() < 0.5:
        it.model.load_state_dict(state)


def write_between_steps(it):
    with torch.no_grad():
        for param in it.model.parameters():
            param.mul_(0.9)
    for param in it.model.parameters():
        param.data.add_(0.01)
    plainly(it)


def fail_in_forward(it):
    node, count = it.some_node(), it.choose.randrange(3)

    def fail(*_):
        raise Interrupted

    handle = node.register_forward_pre_hook(fail) if count else node.register_forward_hook(fail)
    with contextlib.suppress(Interrupted):
        it.backward(it.loss())
    handle.remove()
    it.optimizer.zero_grad()
    plainly(it)


def fail_in_backward(it):
    inputs = it.inputs.requires_grad_() * 1

    def fail(_grad):
        raise Interrupted

    inputs.register_hook(fail)
    again = it.choose.random() < 0.5
    loss = it.loss(inputs)
    with contextlib.suppress(Interrupted):
        it.backward(loss, retain_graph=again)
    it.optimizer.zero_grad()
    if again:
        inputs._backward_hooks.clear()
        it.backward(loss)
        it.optimizer.zero_grad()
    plainly(it)


def evaluate_in_mid_step(it):
    loss = it.loss()
    with torch.no_grad():
        it.loss(it.inputs + 1)
    it.backward(loss)
    it.finish()


def forward_without_backward(it):
    it.loss()
    plainly(it)


def clip(it):
    it.backward(it.loss())
    nn.utils.clip_grad_norm_(it.model.parameters(), 0.1)
    it.finish()


def add_a_module(it):
    node = it.some_node()
    node.extra = nn.Linear(WIDTH, WIDTH)
    nn.init.ones_(node.extra.weight)
    nn.init.ones_(node.extra.bias)
    plainly(it)


def copy_the_model(it):
    copy.deepcopy(it.model)
    plainly(it)


def keep_gradients(it):
    it.backward(it.loss())
    it.optimizer.step()
    it.optimizer.zero_grad(set_to_none=False)


DEEDS = [plainly] * 3 + [
    replace_a_parameter,
    tie_again,
    freeze_or_thaw,
    freeze_between_forward_and_backward,
    call_a_part_directly,
    call_a_part_first,
    use_parameters_outside_forward,
    backward_twice,
    step_between_backwards,
    two_forwards_two_backwards,
    gradients_of_inputs,
    gradient_penalty,
    gradients_of_parameters,
    backward_into_some,
    call_with_other_values,
    state_dict_in_mid_step,
    write_between_steps,
    fail_in_forward,
    fail_in_backward,
    evaluate_in_mid_step,
    forward_without_backward,
    clip,
    add_a_module,
    copy_the_model,
    keep_gradients,
]


def replace_a_module(it):
    nodes = [node for node in nodes_of(it.model) if len(node.below)]
    if nodes:
        node = it.choose.choice(nodes)
        node.below[it.choose.randrange(len(node.below))] = it.new_node()
    plainly(it)


def add_a_module_that_runs(it):
    node, extra = it.some_node(), it.new_node()
    node.extra = extra
    node.register_forward_hook(lambda _module, _args, out: {**out, "y": run(extra, out["y"])})
    if it.choose.random() < 0.5:
        it.optimizer.add_param_group({"params": list(extra.parameters())})
    plainly(it)


def add_a_module_in_forward(it):
    node, extra = it.some_node(), it.new_node()

    def add(module, _args):
        module.extra = extra

    node.register_forward_pre_hook(add)
    plainly(it)


def add_a_module_between_forward_and_backward(it):
    loss = it.loss()
    it.some_node().extra = it.new_node()
    it.backward(loss)
    it.finish()


def remove_a_module(it):
    nodes = [node for node in nodes_of(it.model) if node.calls]
    if nodes:
        it.choose.choice(nodes).calls.pop()
    plainly(it)


def tie_a_module(it):
    nodes = [node for node in nodes_of(it.model) if len(node.below) > 1]
    if nodes:
        below = it.choose.choice(nodes).below
        below[0] = below[1]
    plainly(it)


def untie(it):
    sites = [(node, kind) for node in nodes_of(it.model) for kind in node.kinds]
    params = [getattr(node, kind) for node, kind in sites]
    tied = [
        site
        for site, param in zip(sites, params, strict=True)
        if sum(param is other for other in params) > 1
    ]
    if tied:
        node, kind = it.choose.choice(tied)
        old = getattr(node, kind)
        values = old.full_tensor() if hasattr(old, "full_tensor") else old
        setattr(node, kind, nn.Parameter(values.detach().clone(), old.requires_grad))
    plainly(it)


SEED_OF_CHANGES, SEED_OF_LAYOUTS = 10_000, 20_000
CHANGES = [
    replace_a_module,
    add_a_module,
    add_a_module_that_runs,
    add_a_module_in_forward,
    add_a_module_between_forward_and_backward,
    remove_a_module,
    tie_a_module,
]
