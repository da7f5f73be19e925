# SPDX-License-Identifier: Apache-2.0
"""Models of the transformers library, small ones from random configs, train as in one process.

They compute in fp64 as far as the library lets them: Llama, Mixtral and T5 take their norms, and
rotary positions, in fp32 whatever the dtype; the loss is taken here, since theirs is in fp32 too.
"""

from functools import cache

import pytest
from support.sampling import survey

pytest.importorskip("transformers", reason="transformers is not installed")

import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from support import beside
from support.beside import DOORS, params_of
from support.models import place_of
from support.rounding import rounding, rounding_by_adam
from support.training import Run, mean_losses
from support.world import on_processes
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer
from transformers.models.t5.modeling_t5 import T5Block, T5Stack

from fullshard.core.errors import ConfigurationError, UsageError
from fullshard.testing import LocalWorld
from fullshard.torch import (
    ShardingStrategy,
    register_fsdp_forward_method,
)

WORDS, LENGTH, STEPS, PER_RANK = 31, 6, 3, 2
IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
SMALL = {
    "vocab_size": WORDS,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
    **IDS,
}

LEARNING_RATE = 1e-2
NO_DROPOUT = {
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}


@dataclass(frozen=True)
class Case:
    """A model, the class of its blocks, and how it is trained."""

    build: Callable[[], nn.Module]
    block: type[nn.Module]
    optimizer: Callable[..., torch.optim.Optimizer]
    inside: torch.dtype = torch.float64
    """The shortest dtype to which the model casts by itself."""


def _gpt2():
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_positions=16,
        n_embd=12,
        n_layer=2,
        n_head=2,
        **NO_DROPOUT["gpt2"],
        **IDS,
    )
    return transformers.GPT2LMHeadModel(config)


def _llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))


def _mixtral():
    config = transformers.MixtralConfig(
        **SMALL,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=None,
        experts_implementation="eager",
    )
    return transformers.MixtralForCausalLM(config)


def _bert():
    small = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
    return transformers.BertForMaskedLM(transformers.BertConfig(**small, **NO_DROPOUT["bert"]))


def _t5():
    config = transformers.T5Config(
        vocab_size=WORDS,
        d_model=12,
        d_kv=6,
        d_ff=20,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=2,
        **IDS,
    )
    return transformers.T5ForConditionalGeneration(config)


_adamw = partial(torch.optim.AdamW, lr=LEARNING_RATE)
# Without decay: an expert that no token chose may be left without gradient in one process, and
# AdamW would leave it alone there, while sharded its gradient is zero and AdamW would decay it.
_sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)

CASES = {
    "gpt2": Case(_gpt2, GPT2Block, _adamw),
    "bert": Case(_bert, BertLayer, _adamw),
    "llama": Case(_llama, LlamaDecoderLayer, _adamw, torch.float32),
    "t5": Case(_t5, T5Block, _adamw, torch.float32),
    "mixtral": Case(_mixtral, MixtralDecoderLayer, _sgd, torch.float32),
}

_alone = threading.Lock()  # torch's generator and default dtype are one for all threads


def make(name):
    """The case's model in fp64, the same at every call."""
    with _alone:
        torch.manual_seed(0)
        return CASES[name].build().double().train()


def make_batches(world):
    """Tokens and labels for all ranks of each step."""
    generator = torch.Generator().manual_seed(7)
    size = (STEPS, 2, world * PER_RANK, LENGTH)
    return torch.randint(3, WORDS, size, generator=generator).unbind()


def train(model, name, batches):
    optimizer = CASES[name].optimizer(model.parameters())
    losses, norms = [], []
    for tokens, labels in batches:
        decoder = (
            {"decoder_input_ids": labels.roll(1, 1)} if model.config.is_encoder_decoder else {}
        )
        logits = model(input_ids=tokens, **decoder).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def train_plain(name, world):
    model = make(name)
    losses, norms = train(model, name, make_batches(world))
    return Run(losses, norms, params_of(model))


def train_sharded(comm, name, door, strategy="FULL_SHARD", checkpointing=None, units=None):
    """On this rank's part of the batches; ``checkpointing`` is the reentrant kind or the other.

    ``units`` are the classes of modules to be units, by default that of the blocks.
    """
    rank, size = place_of(comm)
    plain = make(name)
    if checkpointing is not None:
        # the newer name; releases that have it warn of the older
        enable = getattr(plain, "activation_checkpointing_enable", None)
        enable = enable or plain.gradient_checkpointing_enable
        enable({"use_reentrant": checkpointing == "reentrant"})
        assert any(getattr(module, "gradient_checkpointing", False) for module in plain.modules())
    model = shard(plain, units or {CASES[name].block}, comm, door, strategy)
    part = slice(rank * PER_RANK, (rank + 1) * PER_RANK)
    batches = [(tokens[part], labels[part]) for tokens, labels in make_batches(size)]
    losses, norms = train(model, name, batches)
    return Run(losses, norms, params_of(model))


def shard(model, units, comm, door, strategy="FULL_SHARD"):
    """One unit for each module of the classes ``units`` and one for the rest."""
    if door == "wrapper":
        options = {"sharding_strategy": ShardingStrategy[strategy]}
    else:
        options = {"reshard_after_forward": None if strategy == "FULL_SHARD" else False}
    return beside.shard(model, comm, door, units, **options)


def generate(model, rank, **how):
    """This rank's prompt and what follows it: as many tokens as its number and two more."""
    prompt = torch.tensor([[3 + rank, 5, 7]])
    how |= {"max_new_tokens": 2 + rank, "do_sample": False, "eos_token_id": None}
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), **how).tolist()


def initialised_from_meta(group, name):
    """Values that ``init_weights`` gives a model from the meta device; plain without group."""
    with torch.device("meta"):
        model = CASES[name].build().double()
    if group is not None:
        model = shard(model, {CASES[name].block}, group, "function")
    model.to_empty(device="cpu")
    if group is None:
        model.tie_weights()  # which to_empty of a plain model unties
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights()
    return params_of(model), dict(model.named_buffers())


def saved(group, name, folder, adapters=False):
    """Save the trained model sharded, and a state dict of one's own; return the errors' texts.

    One of them is of rank 0 alone before that, one of all ranks on a folder that is a file.
    """
    plain = make(name)
    if adapters:
        plain = with_adapters(plain, name)
    model = shard(plain, {CASES[name].block}, group, "function")
    texts = []
    if group.rank() == 0:
        with pytest.raises(UsageError) as alone:
            model.save_pretrained(folder / "alone")
        texts.append(str(alone.value))
    model(input_ids=torch.tensor([[3, 5, 7]]))  # in which rank 1 waits for rank 0
    (folder / f"a_file_{group.rank()}").touch()
    with pytest.raises(ConfigurationError) as refused:
        model.save_pretrained(folder / "a_file_0" / "below")
    texts.append(str(refused.value))
    model.save_pretrained(folder / "bare", max_shard_size="5KB")
    files = sorted(path.name for path in (folder / "bare").iterdir())
    whole = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if group.rank() == 0:
        model.save_pretrained(folder / "own", state_dict=whole)
    return texts, files


def with_adapters(model, name):
    """LoRA on the attention of each block, with values that are not zero."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    modules = {"gpt2": ["c_attn"], "llama": ["q_proj", "v_proj"]}[name]
    config = peft.LoraConfig(
        r=2,
        target_modules=modules,
        init_lora_weights=False,
        fan_in_fan_out=name == "gpt2",
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(1)
    with warnings.catch_warnings():  # it asks transformers by a name that will go
        warnings.simplefilter("ignore", FutureWarning)
        return peft.get_peft_model(model, config).double()


plain = cache(train_plain)


def compare(name, runs):
    whole, inside = plain(name, len(runs)), CASES[name].inside
    check_figures(mean_losses(runs), whole.losses, inside)
    assert runs[0].params.keys() == whole.params.keys()
    for run in runs:
        check_figures(run.norms, whole.norms, inside)
        for key, expected in whole.params.items():
            atol = rounding_by_adam(STEPS, expected.numel(), LEARNING_RATE)
            atol = 1e-9 if inside is torch.float64 else atol
            torch.testing.assert_close(run.params[key], expected, rtol=0, atol=atol)


def check_figures(found, expected, dtype):
    for updates, (mine, other) in enumerate(zip(found, expected, strict=True)):
        assert mine == pytest.approx(other, abs=1e-9, rel=rounding(updates, dtype, dtype))


@pytest.mark.parametrize("checkpointing", [None, "reentrant", "not reentrant"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", CASES)
def test_three_steps_equal_one_process(name, door, world, strategy, checkpointing):
    """With gradient checkpointing as the library does it, too."""
    how = {"door": door, "strategy": strategy, "checkpointing": checkpointing}
    compare(name, LocalWorld(world).run(lambda comm: train_sharded(comm, name, **how)))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("name", "units"),
    [("gpt2", {GPT2Block, nn.Embedding, nn.Linear}), ("t5", {T5Block, T5Stack, nn.Linear})],
    ids=["gpt2", "t5"],
)
def test_weights_that_are_tied_across_units(name, units, door):
    """The embedding and the head are units of their own that share a weight."""
    how = {"door": door, "units": units}
    compare(name, LocalWorld(3).run(lambda comm: train_sharded(comm, name, **how)))


@pytest.mark.parametrize(
    ("name", "door", "registered"),
    [
        survey(("gpt2", "wrapper", True)),
        ("t5", "function", True),
        ("llama", "function", False),
    ],
)
@on_processes(2, joined=True)
def test_generate_with_ranks_that_end_apart(name, door, registered):
    """All processes of the default group, over which the library's ``synced_gpus`` votes.

    Where the library calls the root itself the function needs no registration; a wrapper does, and
    so does T5, of which it calls the encoder first.
    """
    group = dist.group.WORLD
    model = shard(make(name).eval(), {CASES[name].block}, group, door)
    if registered:
        register_fsdp_forward_method(model, "generate")
    found = generate(model, group.rank(), synced_gpus=True)
    assert found == generate(make(name).eval(), group.rank())


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_initialisation_after_sharding_on_meta(gloo_world, name):
    """Bit by bit, which needs the library to take sharded classes for its own models."""
    expected = initialised_from_meta(None, name)
    for found in gloo_world.run(2, initialised_from_meta, name):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["gpt2", "llama"])  # tied, and not tied
def test_save_pretrained_writes_what_the_plain_model_does(gloo_world, tmp_path, name):
    plain = make(name)
    plain.save_pretrained(tmp_path / "plain", max_shard_size="5KB")
    results = gloo_world.run(2, saved, name, tmp_path)
    check_refusals([texts for texts, _ in results])
    files = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert len(files) > 5
    assert [found for _, found in results] == [files, files]
    for file in files:
        assert (tmp_path / "bare" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()
    for folder in ("bare", "own"):
        loaded = type(plain).from_pretrained(tmp_path / folder, dtype=torch.float64).state_dict()
        torch.testing.assert_close(loaded, plain.state_dict(), rtol=0, atol=0)


def test_save_pretrained_writes_adapters(gloo_world, tmp_path):
    plain = with_adapters(make("gpt2"), "gpt2")
    plain.save_pretrained(tmp_path / "plain")
    check_refusals([texts for texts, _ in gloo_world.run(2, saved, "gpt2", tmp_path, True)])
    expected = load_file(tmp_path / "plain" / "adapter_model.safetensors")
    for folder in ("bare", "own"):
        found = load_file(tmp_path / folder / "adapter_model.safetensors")
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def check_refusals(texts):
    (alone, on_first), (on_second,) = texts
    assert "rank 0 calls save_pretrained(), which all of ranks [0, 1] must call" in alone
    assert "could not save the model: [Errno" in on_first
    assert on_second == "could not save the model: the error is on another rank"
