# SPDX-License-Identifier: Apache-2.0
"""Scripts written for PyTorch's FSDP lose the same with it and, unchanged, with fullshard."""

import re
from pathlib import Path

import pytest
from support.script_world import ScriptWorld

SCRIPTS = Path(__file__).parent / "scripts"
T5, GPT = "summarize_t5_fsdp1.py", "gpt_fsdp2_checkpoints.py"
OWN = "own_checkpoints_fsdp2.py"
ACCUMULATE, HYBRID, LORA = "accumulate_fsdp1.py", "hybrid.py", "lora.py"
NUMBER = r"(loss|norm) (\S+)"
# A norm that is rounded elsewhere changes the last bits of weights, and bf16 magnifies some of
# them. The next loss averages that, the next norm does not.
TOLERANCES = {"loss": 1e-5, "norm": 1e-3}

COMMANDS = {
    "T5, full and sharded checkpoints": [T5, "--checkpoint-dir"],
    "T5 in bf16": [T5, "--bf16", "--strategy", "SHARD_GRAD_OP"],
    "GPT, distributed checkpoints": [GPT, "--explicit-prefetching", "--checkpoint-dir"],
    "GPT in mixed precision": [GPT, "--mixed-precision", "--checkpoint-dir"],
    "checkpoints of the script's own": [OWN, "--checkpoint-dir"],
    "LoRA, FSDP1": [LORA, "--checkpoint-dir"],
    "LoRA, FSDP1, frozen apart": [LORA, "--separate-units"],
    "LoRA, FSDP2, offloaded": [LORA, "--fsdp2", "--offload"],
    "accumulation, recomputation": [ACCUMULATE, "--recompute"],
    "accumulation, scaled": [ACCUMULATE, "--scale", "--policy", "class"],
    "accumulation, scaled fp16": [ACCUMULATE, "--scale", "--fp16", "--policy", "custom"],
    "hybrid by policy": [HYBRID, "--door", "policy", "--mesh", "1x2"],
    "hybrid by wrap()": [HYBRID, "--door", "enable_wrap", "--mesh", "1x2"],
    "hybrid, replicated": [HYBRID, "--door", "fully_shard", "--mesh", "2x1"],
}


def commands(folder):
    """COMMANDS with paths, each with a folder of its own for what it saves."""
    filled = {}
    for number, (name, (script, *arguments)) in enumerate(COMMANDS.items()):
        own = folder / str(number)
        own.mkdir(parents=True)
        if arguments[-1] == "--checkpoint-dir":
            arguments = [*arguments, own]
        filled[name] = [SCRIPTS / script, *arguments]
    return filled


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripts")
    both = [
        ScriptWorld(commands(folder / name), drop_in=name == "fullshard")
        for name in ("PyTorch", "fullshard")
    ]
    return [world.outputs() for world in both]


@pytest.mark.parametrize("name", COMMANDS)
def test_losses_are_pytorchs(outputs, name):
    printed = []
    for answers in outputs:
        ok, text = answers[name]
        assert ok, text
        printed.append(text)
    theirs, ours = printed
    assert re.sub(NUMBER, r"\1", ours) == re.sub(NUMBER, r"\1", theirs)
    assert len(re.findall(NUMBER, theirs)) >= 10
    for mine, other in zip(re.finditer(NUMBER, ours), re.finditer(NUMBER, theirs), strict=True):
        tolerance = TOLERANCES[mine[1]]
        assert float(mine[2]) == pytest.approx(float(other[2]), abs=tolerance, rel=0)
