# SPDX-License-Identifier: Apache-2.0
"""What one fresh interpreter sees before, while and after the drop-in is on; run as a script.

Each check prints its name and what failed in it; they build on each other, in this order.
"""

import importlib
import json
import sys
import traceback
from multiprocessing import spawn
from types import ModuleType

from torch import nn

MODULES = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp.api",
    "torch.distributed.fsdp.fully_sharded_data_parallel",
    "torch.distributed.fsdp.sharded_grad_scaler",
    "torch.distributed.fsdp.wrap",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)
PLAIN = spawn.get_preparation_data


def names():
    """Every name that a script can reach in the served modules, with what is there."""
    found = {}
    for module in MODULES:
        found[module] = importlib.import_module(module)
        for name, value in vars(found[module]).items():
            if name not in ("__builtins__", "__warningregistry__"):
                found[f"{module}.{name}"] = value
    return found


def same(one, other):
    assert one.keys() == other.keys()
    changed = [name for name in one if one[name] is not other[name]]
    assert not changed, changed


def error_of(statement, known=None):
    try:
        exec(statement, known or {})
    except Exception as error:
        return error
    raise AssertionError(f"no error from {statement}")


def torch_is_untouched_without():
    same(BEFORE, names())
    assert spawn.get_preparation_data is PLAIN


def names_that_a_script_has_taken_are_told():
    for statement in (
        "from torch.distributed.fsdp import FullyShardedDataParallel as it",
        "import torch.distributed.fsdp.wrap as it",
        "from torch.distributed._composable.fsdp import fully_shard as it",
    ):
        script = ModuleType("a_script")
        exec(statement, vars(script))
        sys.modules["a_script"] = script
        error = error_of("import fullshard.drop_in")
        assert type(error).__name__ == "UsageError"
        assert "a_script.it. " in str(error)
        assert "fullshard run" in str(error)
        del sys.modules["a_script"]
    same(BEFORE, names())


def public_names_are_fullshards():
    import fullshard.drop_in  # noqa: PLC0415
    import fullshard.torch  # noqa: PLC0415
    import fullshard.wrap  # noqa: PLC0415

    assert fullshard.drop_in.is_on()
    fullshard.drop_in.switch_on()  # once more changes nothing
    for module in MODULES[:-1]:
        theirs, mine = BEFORE[module], importlib.import_module(module)
        assert mine is not theirs
        exported = getattr(theirs, "__all__", ["ShardedGradScaler"])
        if module.endswith("_composable.fsdp"):
            exported = ["fully_shard", "FSDPModule", "MixedPrecisionPolicy"]
        for name in exported:
            ours = fullshard.wrap if module.endswith(".wrap") else fullshard.torch
            assert getattr(mine, name) is getattr(ours, name), (module, name)
    star = {}
    exec("from torch.distributed.fsdp import *", star)
    assert star["fully_shard"] is fullshard.torch.fully_shard
    exec("from torch.distributed._composable.fsdp.fully_shard import fully_shard as old", star)
    assert star["old"] is fullshard.torch.fully_shard
    exec("from torch.distributed.fsdp.fully_sharded_data_parallel import CPUOffload as c", star)
    assert star["c"] is fullshard.torch.CPUOffload
    exec("import torch.distributed.fsdp.wrap as w, torch.distributed as d", star)
    assert star["w"] is star["d"].fsdp.wrap
    assert star["w"].ModuleWrapPolicy is fullshard.wrap.ModuleWrapPolicy


def what_is_lacking_is_told():
    from fullshard.drop_in.switch import stand_in  # noqa: PLC0415 - it switches torch

    star = {}
    exec("from torch.distributed.fsdp import FlatParameter", star)  # nothing is an instance
    assert not isinstance(nn.Linear(1, 1).weight, star["FlatParameter"])
    newer = ModuleType("torch.distributed.fsdp.api")  # of a torch that has a class more
    newer.Novel = type("Novel", (), {"__module__": newer.__name__})
    star["api"] = stand_in(newer)
    assert "Novel" not in dir(star["api"])
    error = error_of("api.Novel", star)
    assert isinstance(error, ImportError)
    assert "fullshard stands in for torch.distributed.fsdp.api and has no Novel" in str(error)
    error = error_of("from torch.distributed.fsdp import no_such_name")
    assert "cannot import name 'no_such_name'" in str(error)


def private_names_stay_torchs():
    import torch.distributed.fsdp._fully_shard._fsdp_state as state  # noqa: PLC0415
    from torch.distributed.fsdp import _runtime_utils  # noqa: PLC0415
    from torch.distributed.fsdp.wrap import _or_policy  # noqa: PLC0415

    assert state.__name__ == "torch.distributed.fsdp._fully_shard._fsdp_state"
    assert _runtime_utils is BEFORE["torch.distributed.fsdp"]._runtime_utils
    assert _or_policy is BEFORE["torch.distributed.fsdp.wrap"]._or_policy


def torchs_own_modules_keep_torchs():
    from torch.distributed.checkpoint import state_dict  # noqa: PLC0415
    from torch.distributed.pipelining import stage  # noqa: PLC0415

    wrapper = BEFORE["torch.distributed.fsdp.FullyShardedDataParallel"]
    assert state_dict.FSDP is wrapper
    assert stage.FSDPModule is BEFORE["torch.distributed.fsdp.FSDPModule"]
    # What torch's class looks for when it runs is torch's class too.
    home = sys.modules[wrapper.__module__]
    assert wrapper.fsdp_modules.__globals__["FullyShardedDataParallel"] is wrapper
    assert home.FullyShardedDataParallel is not wrapper


def activation_checkpointing_takes_our_policies():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (  # noqa: PLC0415
        CheckpointWrapper,
        apply_activation_checkpointing,
    )
    from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy  # noqa: PLC0415

    for given in (
        {"check_fn": lambda module: isinstance(module, nn.Linear)},
        {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})},
        {"auto_wrap_policy": CustomPolicy(lambda module: isinstance(module, nn.Linear))},
    ):
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        apply_activation_checkpointing(model, **given)
        assert [isinstance(each, CheckpointWrapper) for each in model] == [True, False]


def switched_off_torch_is_as_before():
    import fullshard.drop_in  # noqa: PLC0415

    assert spawn.get_preparation_data is not PLAIN
    fullshard.drop_in.switch_off()
    assert not fullshard.drop_in.is_on()
    same(BEFORE, names())
    assert spawn.get_preparation_data is PLAIN
    fullshard.drop_in.switch_off()  # once more changes nothing
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    assert fully_shard is BEFORE["torch.distributed.fsdp.fully_shard"]


CHECKS = (
    torch_is_untouched_without,
    names_that_a_script_has_taken_are_told,
    public_names_are_fullshards,
    what_is_lacking_is_told,
    private_names_stay_torchs,
    torchs_own_modules_keep_torchs,
    activation_checkpointing_takes_our_policies,
    switched_off_torch_is_as_before,
)

if __name__ == "__main__":
    BEFORE = names()
    import fullshard.torch
    import fullshard.wrap  # noqa: F401

    for check in CHECKS:
        try:
            check()
            print(json.dumps([check.__name__, None]))
        except Exception:
            print(json.dumps([check.__name__, traceback.format_exc()]))
