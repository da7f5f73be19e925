# SPDX-License-Identifier: Apache-2.0
"""Scripts written for PyTorch's FSDP lose the same with it and, unchanged, with fullshard."""

import functools
import re
from pathlib import Path

import pytest
import torch
from support.layouts import SWAPPED
from support.rounding import rounding
from support.world import home_of, run_script, without_warnings

SCRIPTS = Path(__file__).parent / "scripts"
T5, CHECKPOINTS = "summarize_t5_fsdp1.py", "checkpoints_fsdp2.py"
IN_PLACE = "resume_in_place_fsdp2.py"
RANK_0, PLACEMENTS = "weights_on_rank_0_fsdp2.py", "placements_fsdp2.py"
ACCUMULATE, LORA = "accumulate_fsdp1.py", "lora.py"
RESUMING = (CHECKPOINTS, IN_PLACE)
NUMBER = r"(loss|norm) (\S+)"
PRINTED = {"loss": 1e-8, "norm": 1e-6}  # one unit of the last digit that the scripts print
AVERAGED = {T5: 2 * 4 * 6, CHECKPOINTS: 4 * 12}  # the predictions in a loss that is printed
PRECISIONS = {
    "--bf16": torch.bfloat16,
    "--mixed-precision": torch.bfloat16,
    "--fp16": torch.float16,
    "Muon": torch.bfloat16,  # iterates in it
}

COMMANDS = {
    "T5, full and sharded checkpoints": [T5, "--checkpoint-dir"],
    "T5 in bf16": [T5, "--bf16", "--strategy", "SHARD_GRAD_OP"],
    "three ways to save": [CHECKPOINTS, "--explicit-prefetching", "--checkpoint-dir"],
    "saved in mixed precision": [
        *(CHECKPOINTS, "--mixed-precision", "--accumulate", "--explicit-prefetching"),
        "--checkpoint-dir",
    ],
    "resumed in place": [IN_PLACE, "--checkpoint-dir"],
    "saved in background": [IN_PLACE, "--in-background", "--mixed-precision", "--checkpoint-dir"],
    "weights on rank 0": [RANK_0],
    "weights on rank 0, offloaded": [RANK_0, "--bf16", "--tied", "--offload"],
    "placements of each": [PLACEMENTS],
    "placements and replicas": [PLACEMENTS, "--mesh", "2x1"],
    "rows by Muon": [PLACEMENTS, "--mesh", "1x2", "--rows", "--optimizer", "Muon"],
    "LoRA, FSDP1, frozen apart": [LORA, "--separate-units", "--checkpoint-dir"],
    "LoRA, FSDP2, offloaded": [LORA, "--fsdp2", "--offload"],
    "accumulation, recomputation": [ACCUMULATE, "--recompute", "--policy", "class"],
    "accumulation, scaled fp16": [ACCUMULATE, "--scale", "--fp16", "--policy", "custom"],
}

if SWAPPED:  # these want DTensors, or refuse to go on
    BY_ROW = (CHECKPOINTS, IN_PLACE, RANK_0, PLACEMENTS)
    COMMANDS = {name: each for name, each in COMMANDS.items() if each[0] not in BY_ROW}

ALWAYS = (  # the others are surveys
    *("T5 in bf16", "saved in mixed precision", "weights on rank 0, offloaded"),
    *("rows by Muon", "LoRA, FSDP1, frozen apart", "accumulation, scaled fp16"),
)


def as_params(names):
    return [
        pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.thorough) for name in names
    ]


@pytest.fixture(scope="module")
def printed(gloo_world, drop_in_world, tmp_path_factory):
    """Gives what rank 0 prints in a command, by PyTorch and by fullshard; runs each once."""

    homes = [
        set(world.launch(2, home_of, "torch.distributed.fsdp", "fully_shard"))
        for world in (gloo_world, drop_in_world)
    ]
    assert homes == [{"torch.distributed.fsdp"}, {"fullshard.torch.fsdp2.fully_shard"}]

    @functools.cache
    def run(name):
        script, *arguments = COMMANDS[name]
        texts = []
        for world in (gloo_world, drop_in_world):
            folder = tmp_path_factory.mktemp("script")
            own = [folder] if "--checkpoint-dir" in arguments else []
            ranks = world.launch(
                2, without_warnings, run_script, SCRIPTS / script, [*arguments, *own], folder
            )
            texts.append(ranks[0])
        return texts

    return run


@pytest.mark.parametrize("name", as_params(COMMANDS))
def test_losses_are_pytorchs(printed, name):
    theirs, ours = printed(name)
    assert re.sub(NUMBER, r"\1", ours) == re.sub(NUMBER, r"\1", theirs)
    assert len(re.findall(NUMBER, theirs)) >= 10
    dtype = next((PRECISIONS[each] for each in COMMANDS[name] if each in PRECISIONS), torch.float32)
    averaged = {"loss": AVERAGED.get(COMMANDS[name][0], 1), "norm": 1}
    for kind, digit in PRINTED.items():
        pairs = zip(numbers(kind, ours), numbers(kind, theirs), strict=True)
        for updates, (mine, other) in enumerate(pairs):
            tolerance = digit + abs(other) * rounding(updates, dtype) / averaged[kind] ** 0.5
            assert mine == pytest.approx(other, rel=0, abs=tolerance), (kind, updates)


@pytest.mark.parametrize(
    "name", as_params(name for name in COMMANDS if COMMANDS[name][0] in RESUMING)
)
def test_a_resumed_run_repeats_itself_to_the_last_digit(printed, name):
    _, text = printed(name)
    before, again = {}, 0
    for step, line in re.findall(r"(step \d+) (.+)", text):
        again += step in before
        assert before.setdefault(step, line) == line
    assert again >= 4


def numbers(kind, text):
    return [float(number) for found, number in re.findall(NUMBER, text) if found == kind]
