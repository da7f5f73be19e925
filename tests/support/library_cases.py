# SPDX-License-Identifier: Apache-2.0
"""What is trained through which library: names and options, without the libraries themselves."""

from dataclasses import dataclass, field

BATCH, STEPS, SAVED_AT = 4, 6, 4


@dataclass(frozen=True)
class Answer:
    """One rank's figures; ``resumed`` are the losses from SAVED_AT on after loading."""

    engine: str
    losses: list
    norms: list
    resumed: list
    weights: dict


@dataclass(frozen=True)
class AccelerateCase:
    version: int
    model: str = "net"
    precision: str = "no"
    accumulation: int = 1
    loaded_as: str = "float32"
    """The dtype of the model before it is prepared."""
    model_first: bool = False
    """Prepare the model, then create the optimizer: needed under version 1 without
    use_orig_params, impossible under version 2."""
    options: dict = field(default_factory=dict)

    @property
    def torch_can_save(self):
        """On a CPU: there FSDP1 frees its flat parameter while it makes a full state dict of it."""
        return self.version == 2 or self.options["state_dict_type"] != "full_state_dict"


FULL, SHARDED = {"state_dict_type": "full_state_dict"}, {"state_dict_type": "sharded_state_dict"}
RECOMPUTED, EFFICIENT = {"activation_checkpointing": True}, {"cpu_ram_efficient_loading": True}
FLAT = {"use_orig_params": False, "reshard_after_forward": "SHARD_GRAD_OP"}

ACCELERATE = {
    "1-full": AccelerateCase(
        1, precision="bf16", accumulation=2, loaded_as="bfloat16", options=FULL
    ),
    "1-flat": AccelerateCase(1, model_first=True, options={**FLAT, **FULL}),
    "1-sharded": AccelerateCase(1, "gpt2", options={**RECOMPUTED, **SHARDED}),
    "2-sharded": AccelerateCase(2, accumulation=2, options={**RECOMPUTED, **EFFICIENT, **SHARDED}),
    "2-efficient": AccelerateCase(2, "gpt2", options={**EFFICIENT, **FULL}),
    "2-full-bf16": AccelerateCase(2, precision="bf16", loaded_as="bfloat16", options=FULL),
}


@dataclass(frozen=True)
class FabricCase:
    model: str = "net"
    precision: str = "32-true"
    accumulation: int = 1
    model_first: bool = False
    """Set up the model, then create the optimizer, instead of both together."""
    options: dict = field(default_factory=dict)

    @property
    def torch_can_save(self):
        """See `AccelerateCase.torch_can_save`."""
        return self.options["state_dict_type"] != "full"


FABRIC = {
    "sharded-bf16-true": FabricCase(
        precision="bf16-true",
        model_first=True,
        options={"state_dict_type": "sharded", "use_orig_params": False},
    ),
    "full": FabricCase(accumulation=2, options={"state_dict_type": "full"}),
    "sharded-recomputed": FabricCase(
        "gpt2",
        precision="bf16-mixed",
        model_first=True,
        options={"state_dict_type": "sharded", "recomputed": True},
    ),
}


@dataclass(frozen=True)
class ModelParallelCase:
    model: str = "net"
    precision: str = "32-true"
    accumulation: int = 1
    whole: bool = False
    """Save in one file, not in one for each rank."""
    from_meta: bool = False
    """Resume into a model made on the meta device."""

    torch_can_save = True


MODEL_PARALLEL = {
    "whole": ModelParallelCase(accumulation=2, whole=True, from_meta=True),
    "distributed": ModelParallelCase(from_meta=True),
    "whole-gpt2": ModelParallelCase("gpt2", precision="bf16-mixed", whole=True),
}


@dataclass(frozen=True)
class TransformersCase:
    """`from_pretrained` with a ``distributed_config``."""

    model: str = "llama"
    accumulation: int = 1
    distributed: bool = True
    """Save in one file for each rank."""

    torch_can_save = True


TRANSFORMERS = {
    "sharded": TransformersCase(),
    "whole": TransformersCase(distributed=False),
}
CASES = {
    "accelerate": ACCELERATE,
    "fabric": FABRIC,
    "model_parallel": MODEL_PARALLEL,
    "transformers": TRANSFORMERS,
}
