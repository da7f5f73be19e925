# SPDX-License-Identifier: Apache-2.0
"""Wrapping policies choose the modules that ``torch.distributed.fsdp.wrap`` chooses."""

import functools

import pytest
import torch.distributed.fsdp.wrap as theirs
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fullshard.wrap as ours
from fullshard.core.errors import ConfigurationError


def names_of(root, modules):
    first_name = {module: name for name, module in root.named_modules()}
    return [first_name[module] for module in modules]


def our_choice(root, policy, ignored=()):
    return names_of(root, ours.modules_to_wrap(root, policy, set(ignored)))


def their_choice(root, policy, ignored=()):
    """What PyTorch would wrap, in its order: its recursion around a wrapper that only records."""
    recorded = {}  # PyTorch visits a shared module at each place; the first is the one that counts

    def record(module, **kwargs):
        return recorded.setdefault(module, module)

    left_out = {below for module in ignored for below in module.modules()}
    if isinstance(policy, theirs._Policy):
        targets = policy._run_policy(root, left_out, {})
        theirs._post_order_apply(root, theirs._construct_wrap_fn(root, targets, record))
    else:
        params = {param for module in left_out for param in module.parameters(recurse=False)}
        theirs._recursive_wrap(root, policy, record, left_out, params, only_wrap_children=True)
    return names_of(root, recorded)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        self.scale = nn.Parameter(nn.Linear(1, 8).weight.detach())


class Containers(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.heads = nn.ModuleDict({"a": nn.Linear(8, 3), "b": nn.Sequential(nn.Linear(8, 20))})
        self.absent = None
        self.register_module("never", None)


class Sharing(nn.Module):
    """One leaf at three places, one subtree at two, and one weight tied between two modules."""

    def __init__(self):
        super().__init__()
        leaf, subtree = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
        self.first = nn.Sequential(leaf, subtree, leaf)
        self.second = nn.Sequential(nn.Linear(4, 4), subtree, leaf)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.second[0].weight


MODELS = {
    "transformer": lambda: nn.Transformer(8, 2, 2, 2, 16, batch_first=True),
    "nested": lambda: nn.Sequential(
        nn.Linear(3, 5), nn.Sequential(nn.Linear(5, 7), nn.Sequential(nn.Linear(7, 9), nn.ReLU()))
    ),
    "containers": Containers,
    "attention": lambda: nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8)),
    "sharing": Sharing,
    "empty": nn.Sequential,
    "no parameters": lambda: nn.Sequential(nn.ReLU(), nn.Sequential(nn.Identity())),
}


def thresholds(root):
    """Every threshold at which an answer can change, and their neighbours."""
    sizes = {sum(param.numel() for param in module.parameters()) for module in root.modules()}
    return sorted({size + step for size in sizes | {0} for step in (-1, 0, 1)})


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_every_policy_chooses_as_in_pytorch(build):
    root = build()

    def odd_input(module):
        return getattr(module, "in_features", 0) % 2 == 1 or isinstance(module, nn.Sequential)

    some = {nn.TransformerEncoderLayer, nn.Linear, nn.Embedding, Block}
    by_size = [
        functools.partial(ours.size_based_auto_wrap_policy, min_num_params=numel, **options)
        for numel in thresholds(root)
        for options in ({}, {"force_leaf_modules": {nn.Sequential, Block}})
    ]
    by_class = functools.partial(ours.transformer_auto_wrap_policy, transformer_layer_cls=some)
    for policy in (
        *by_size,
        ours.ModuleWrapPolicy(some),
        ours.CustomPolicy(odd_input),
        by_class,
        functools.partial(ours.lambda_auto_wrap_policy, lambda_fn=odd_input),
        functools.partial(theirs._or_policy, policies=[by_class, by_size[0]]),
    ):
        assert our_choice(root, policy) == their_choice(root, policy), policy


@pytest.mark.parametrize("name", ["", "embed", "blocks", "blocks.0", "blocks.1.attention"])
def test_ignored_modules_are_left_out_with_all_below_them(name):
    root = Containers()
    ignored = [root.get_submodule(name)]
    for policy in (
        *(
            functools.partial(ours.size_based_auto_wrap_policy, min_num_params=numel)
            for numel in thresholds(root)
        ),
        ours.ModuleWrapPolicy({nn.Module}),
        ours.CustomPolicy(lambda module: True),
    ):
        chosen = our_choice(root, policy, ignored)
        assert chosen == their_choice(root, policy, ignored)
        assert not set(chosen) & set(names_of(root, ignored[0].modules()))


def test_a_shared_module_is_chosen_once_and_children_come_first():
    root = Sharing()
    chosen = our_choice(root, ours.always_wrap_policy)
    assert chosen == [
        "first.0",
        "first.1.0",
        "first.1.1",
        "first.1",
        "first",
        "second.0",
        "second",
        "tied",
    ]
    assert our_choice(root, ours.ModuleWrapPolicy({nn.Module})) == chosen


LEAVES = [
    lambda: nn.Linear(2, 3),
    lambda: nn.Linear(5, 1, bias=False),
    lambda: nn.Embedding(3, 2),
    nn.ReLU,
    lambda: nn.MultiheadAttention(4, 1),
]


@st.composite
def random_models(draw):
    """Nested containers, in which an earlier module may come again at another place."""
    made = []

    def make(depth):
        if made and draw(st.integers(0, 5)) == 0:
            return draw(st.sampled_from(made))
        if depth == 0 or draw(st.integers(0, 2)) == 0:
            module = draw(st.sampled_from(LEAVES))()
        else:
            children = [make(depth - 1) for _ in range(draw(st.integers(0, 3)))]
            kind = draw(st.sampled_from([nn.Sequential, nn.ModuleList, nn.ModuleDict]))
            if kind is nn.ModuleDict:
                module = kind({f"m{number}": child for number, child in enumerate(children)})
            else:
                module = kind(children) if kind is nn.ModuleList else kind(*children)
        made.append(module)
        return module

    return nn.Sequential(*[make(3) for _ in range(draw(st.integers(0, 4)))])


@given(random_models(), st.data())
def test_random_models_are_wrapped_as_pytorch_wraps_them(root, data):
    ignored = data.draw(st.lists(st.sampled_from(list(root.modules())), max_size=2))
    kwargs = {"min_num_params": data.draw(st.sampled_from(thresholds(root)))}
    if data.draw(st.booleans()):
        kwargs |= {"force_leaf_modules": set(), "exclude_wrap_modules": set()}
    kinds = data.draw(st.sets(st.sampled_from([nn.Linear, nn.Sequential, nn.ModuleList])))
    for policy in (
        functools.partial(ours.size_based_auto_wrap_policy, **kwargs),
        ours.ModuleWrapPolicy(kinds),
    ):
        assert our_choice(root, policy, ignored) == their_choice(root, policy, ignored)


def test_custom_policy_hands_its_overrides_on():
    root = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 2))
    answers = {root[0]: {"forward_prefetch": True}, root[1]: {}, root[2]: True}
    policy = ours.CustomPolicy(lambda module: answers.get(module, False))
    chosen = ours.modules_to_wrap(root, policy)
    assert chosen == {root[0]: {"forward_prefetch": True}, root[2]: {}}
    chosen[root[0]]["forward_prefetch"] = False
    assert answers[root[0]] == {"forward_prefetch": True}


def answer_at(target, answer):
    def policy(module, recurse, nonwrapped_numel):
        return answer if module is target and not recurse else True

    return policy


@pytest.mark.parametrize("answer", [None, "yes", 1, {"forward_prefetch": True}])
def test_an_unknown_answer_of_a_function_names_the_module(answer):
    root = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ConfigurationError) as caught:
        ours.modules_to_wrap(root, answer_at(root[1][0], answer))
    for part in ("policy returned", repr(answer), "'1.0' (Linear)", "True or False"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "policy",
    [ours.CustomPolicy(lambda module: "yes"), ours.ModuleWrapPolicy({"Linear"})],
    ids=["an answer without a meaning", "a class that is none"],
)
def test_a_policy_that_fails_is_named(policy):
    with pytest.raises(ConfigurationError, match=f"{type(policy).__name__}: .* Nothing was"):
        ours.modules_to_wrap(nn.Sequential(nn.Linear(2, 2)), policy)


def test_a_subclass_that_answers_nonsense_is_refused():
    root = nn.Sequential(nn.Linear(2, 2))

    class NoDict(ours.ModuleWrapPolicy):
        def _run_policy(self, root_module, ignored_modules, root_kwargs):
            return [root_module[0]]

    class NoOverrides(ours.ModuleWrapPolicy):
        def _run_policy(self, root_module, ignored_modules, root_kwargs):
            return {root_module[0]: True}

    with pytest.raises(ConfigurationError, match=r"NoDict returned \["):
        ours.modules_to_wrap(root, NoDict({nn.Linear}))
    with pytest.raises(ConfigurationError, match="NoOverrides returned True for '0'"):
        ours.modules_to_wrap(root, NoOverrides({nn.Linear}))


@pytest.mark.parametrize("policy", [{nn.Linear}, "size", 7, None, nn.Linear, ours.ModuleWrapPolicy])
def test_what_is_no_policy_is_refused(policy):
    with pytest.raises(ConfigurationError, match=r"auto_wrap_policy must be .* ModuleWrapPolicy"):
        ours.modules_to_wrap(nn.Sequential(nn.Linear(2, 2)), policy)


@pytest.mark.parametrize(
    "policy",
    [lambda module: True, ours.transformer_auto_wrap_policy, lambda m, recurse, numel: True],
)
def test_a_function_with_other_arguments_is_refused_with_the_way_out(policy):
    with pytest.raises(ConfigurationError, match=r"functools\.partial.*CustomPolicy"):
        ours.modules_to_wrap(nn.Sequential(nn.Linear(2, 2)), policy)


class Wrapper(nn.Module):
    def __init__(self, module, **kwargs):
        super().__init__()
        self.module, self.kwargs = module, kwargs


def test_wrap_outside_of_a_context_returns_the_module_itself():
    module = nn.Linear(2, 2)
    assert ours.wrap(module, forward_prefetch=True) is module
