# SPDX-License-Identifier: Apache-2.0
"""Wrapping policies: which submodules become units of their own.

The policies, `enable_wrap` and `wrap` are those of ``torch.distributed.fsdp.wrap``. A policy comes
in one of two forms. A *stepwise* policy is a function ``(module, recurse, nonwrapped_numel) ->
bool`` that is asked on the way down whether to look below ``module`` and on the way up whether to
wrap it; a *whole* policy (`ModuleWrapPolicy`, `CustomPolicy`) looks at each module once.
`modules_to_wrap` reads both.
Nothing here is collective, and no policy changes a module.
"""

import inspect
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from typing import Any

from torch import nn
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

from fullshard.core.errors import ConfigurationError

__all__ = [
    "CustomPolicy", "ModuleWrapPolicy", "always_wrap_policy", "enable_wrap",
    "lambda_auto_wrap_policy", "modules_to_wrap", "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy", "wrap",
]  # fmt: skip


def modules_to_wrap(
    root: nn.Module, policy: Any, ignored: AbstractSet[nn.Module] = frozenset()
) -> dict[nn.Module, dict[str, Any]]:
    """Return the submodules of ``root`` that ``policy`` makes units of their own; changes nothing.

    Args:
        root: the module being wrapped; itself never in the result.
        policy: a stepwise policy (called with the keywords ``module``, ``recurse`` and
            ``nonwrapped_numel``), or an object with the method ``_run_policy`` of PyTorch's
            policies: `ModuleWrapPolicy`, `CustomPolicy`, PyTorch's own, or a subclass of any.
        ignored: modules left out, with everything below them; their parameters count nowhere.

    Returns:
        Keyword overrides by module, children before parents, siblings in order of registration. A
        module found in several places appears once, at the first.

    Raises:
        ConfigurationError: ``policy`` is no policy, or answered something that has no meaning.
    """
    left_out = {below for module in ignored for below in module.modules()}
    if not isinstance(policy, type):
        if hasattr(policy, "_run_policy"):
            return _run_whole(root, policy, left_out)
        if callable(policy):
            _check_signature(policy)
            return _run_stepwise(root, policy, left_out)
    raise ConfigurationError(
        "auto_wrap_policy must be a function (module, recurse, nonwrapped_numel) -> bool, a "
        f"ModuleWrapPolicy or a CustomPolicy, got {policy!r}; to wrap by class write "
        "ModuleWrapPolicy({TheClass})"
    )


def _run_whole(
    root: nn.Module, policy: Any, left_out: set[nn.Module]
) -> dict[nn.Module, dict[str, Any]]:
    # No keywords of the root go in, so what comes out are the overrides alone.
    try:
        chosen = policy._run_policy(root, left_out, {})
    except (TypeError, ValueError) as error:  # classes that are none, answers without a meaning
        raise ConfigurationError(
            f"auto_wrap_policy {_name_of_policy(policy)}: {error}. Nothing was wrapped"
        ) from error
    if not isinstance(chosen, dict):
        raise _unknown_answer(policy, root, root, chosen, "a dict by module")
    for module, overrides in chosen.items():
        if not isinstance(overrides, dict):
            raise _unknown_answer(policy, root, module, overrides, "a dict")
    return {module: chosen[module] for module in _bottom_up(root) if module in chosen}


def _run_stepwise(
    root: nn.Module, policy: Callable[..., Any], left_out: set[nn.Module]
) -> dict[nn.Module, dict[str, Any]]:
    chosen: dict[nn.Module, dict[str, Any]] = {}
    wrapped_numel: dict[nn.Module, int] = {}
    uncounted = {param for module in left_out for param in module.parameters(recurse=False)}

    def ask(module: nn.Module, recurse: bool, numel: int) -> bool:
        answer = policy(module=module, recurse=recurse, nonwrapped_numel=numel)
        if not isinstance(answer, bool):
            raise _unknown_answer(policy, root, module, answer, "True or False")
        return answer

    def visit(module: nn.Module) -> int:
        """Decide on ``module`` and all below it; return how many of its elements are in units."""
        if module in wrapped_numel:
            # A shared module was decided at its first place. Each further place subtracts its
            # elements again, from a sum that holds them once: PyTorch counts so, and we follow.
            return wrapped_numel[module]
        wrapped_numel[module] = 0
        numel = sum(param.numel() for param in module.parameters() if param not in uncounted)
        if ask(module, True, numel):
            below = sum(visit(child) for child in module.children() if child not in left_out)
            wrapped_numel[module] = below
            if module is not root and ask(module, False, numel - below):
                chosen[module] = {}
                wrapped_numel[module] = numel
        return wrapped_numel[module]

    visit(root)
    return chosen


def _bottom_up(root: nn.Module) -> Iterator[nn.Module]:
    """Return each submodule once, children before parents, without the root."""
    seen = {root}

    def below(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if child not in seen:
                seen.add(child)
                yield from below(child)
                yield child

    return below(root)


def _check_signature(policy: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(policy)
    except ValueError:  # some callables written in C have none to look at
        return
    try:
        signature.bind(module=None, recurse=True, nonwrapped_numel=0)
    except TypeError as error:
        raise ConfigurationError(
            f"auto_wrap_policy {_name_of_policy(policy)}{signature} cannot be called as "
            f"(module=..., recurse=..., nonwrapped_numel=...): {error}; bind further arguments "
            "with functools.partial, and give a function of the module alone as CustomPolicy"
        ) from None


def _unknown_answer(
    policy: Any, root: nn.Module, module: object, answer: object, expected: str
) -> ConfigurationError:
    names = [name for name, known in root.named_modules() if known is module]
    where = f"{names[0]!r}" if names and names[0] else "the root"
    return ConfigurationError(
        f"auto_wrap_policy {_name_of_policy(policy)} returned {answer!r} for {where} "
        f"({type(module).__name__}); expected {expected}. Nothing was wrapped"
    )


def _name_of_policy(policy: Any) -> str:
    function = getattr(policy, "func", policy)  # of a functools.partial
    return str(getattr(function, "__name__", type(function).__name__))
