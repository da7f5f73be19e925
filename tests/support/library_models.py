# SPDX-License-Identifier: Apache-2.0
"""Small models and data that are the same on every rank, for the training libraries' tests."""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import TensorDataset

VOCABULARY = 61


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Rows that two ranks cannot share evenly, and parameters at the root."""

    def __init__(self, width=13, classes=5):
        super().__init__()
        self.first = nn.Linear(7, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.last = nn.Linear(width, classes)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def make(name, seed=0):
    torch.manual_seed(seed)
    if name == "net":
        return Net()
    if name == "llama":
        return _llama()
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415 - may not be installed

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=16,
            n_embd=20,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


def _llama():
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 - as above

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=24,
            intermediate_size=37,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
        )
    )


def block_classes(name):
    """The classes that become units."""
    if name == "net":
        return {Block}
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block  # noqa: PLC0415 - as above

    return {GPT2Block}


def samples(name, count):
    random = torch.Generator().manual_seed(1)
    if name == "net":
        inputs = torch.randn(count, 7, generator=random)
        return TensorDataset(inputs, (inputs.sum(1) > 0).long())
    return TensorDataset(torch.randint(VOCABULARY, (count, 8), generator=random))


def loss_of(name, model, batch):
    if name == "net":
        inputs, labels = batch
        return nn.functional.cross_entropy(model(inputs).float(), labels)
    return model(input_ids=batch[0], labels=batch[0]).loss


def weights_by_summon(wrapper):
    """All parameters of a FullyShardedDataParallel, by the names of the plain model."""
    with FullyShardedDataParallel.summon_full_params(wrapper, writeback=False):
        return as_arrays(
            {
                name.replace("_checkpoint_wrapped_module.", ""): param
                for name, param in wrapper.named_parameters()
            }
        )


def as_arrays(state):
    return {name: value.detach().clone().float().numpy() for name, value in state.items()}


def engine_of(model):
    """The package that has sharded ``model``."""
    engines = [
        cls.__module__.split(".")[0]
        for cls in type(model).__mro__
        if cls.__name__ in ("FSDPModule", "FullyShardedDataParallel")
    ]
    assert len(engines) == 1, type(model).__mro__
    return engines[0]
