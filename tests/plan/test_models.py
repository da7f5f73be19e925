# SPDX-License-Identifier: Apache-2.0
"""Models by name and by config.json: their parameters, their work, and what is refused."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from fullshard.core.errors import ConfigurationError
from fullshard.core.presets import TRANSFORMERS, parameter_numel
from fullshard.plan import (
    MODEL_NAMES,
    Recompute,
    Run,
    Wrap,
    model_from_config,
    named_model,
    read_model,
)
from fullshard.plan.model.config_json import ARCHITECTURES
from fullshard.plan.model.decoder import Decoder
from fullshard.plan.run import AttentionKernel

DATA = Path(__file__).resolve().parents[2] / "benchmarks/data"

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


def test_published_parameter_counts_come_out_to_the_last_one():
    with (DATA / "mosaicml_fsdp_throughput.csv").open() as file:
        for row in csv.DictReader(file):
            model = named_model("mpt-" + row["model"])
            model = Decoder(model.name, replace(model.shape, context=int(row["seq_len"])))
            assert model.spec(Run()).numel == int(row["num_params"])


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_presets_are_those_of_training(name):
    assert named_model(name).spec(Run()).numel == parameter_numel(TRANSFORMERS[name])


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama3-405b", 405.85),
        ("mixtral-8x7b", 46.70),
        ("llama3.2-1b", 1.24),
        ("qwen2.5-7b", 7.62),
        ("gpt3-1.3b", 1.32),
        ("llama-33b", 32.53),
        ("OPT-30B", 29.97),
        ("Llama-2-7b", 6.74),
        ("gpt-oss-20b", 20.91),
        ("gemma3-27b", 27.01),
        ("llama4-scout-17b-16e", 107.77),
        ("smollm3-3b", 3.08),
    ],
)
def test_large_models_have_their_published_size(name, billions):
    assert named_model(name).spec(Run()).numel / 1e9 == pytest.approx(billions, abs=0.01)


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_calls_lie_in_modules_that_own_parameters(name):
    model = named_model(name)
    for wrap in (Wrap.BLOCK, Wrap.PART):
        run = Run(wrap=wrap)
        names = (param.name.split(".")[:-1] for param in model.spec(run))
        owners = {".".join(path[:end]) for path in names for end in range(len(path) + 1)}
        assert all(call.path in owners for call in model.calls(run))


def test_finer_calls_are_the_same_work():
    model = named_model("llama3-8b")

    def work(run):
        return [each for call in model.calls(run) for each in call.operations]

    assert work(Run(wrap=Wrap.PART)) == work(Run(wrap=Wrap.BLOCK))


def test_forward_flops_are_a_third_of_what_mfu_counts_but_for_the_causal_half():
    model = named_model("llama3-8b")
    run = Run(sequence=128)
    forward = sum(each.forward.flops for call in model.calls(run) for each in call.operations)
    assert forward == pytest.approx(model.model_flops(run) / 3, rel=0.01)


def test_lora_trains_little_and_saves_a_third_of_the_products():
    model = named_model("llama3-8b")
    spec = model.spec(Run(lora_rank=16))
    trained = sum(param.numel for param in spec if param.trainable)
    assert 0 < trained < 0.01 * spec.numel
    assert spec.numel - trained == model.spec(Run()).numel

    def flops(run):
        return sum(e.backward.flops for c in model.calls(run) for e in c.operations)

    assert 0.5 < flops(Run(lora_rank=16)) / flops(Run()) < 0.65


def test_tensor_parallelism_cuts_parameters_and_refuses_what_it_cannot_cut():
    model = named_model("llama3-8b")
    runs = (Run(tensor_parallel=each, cut_embedding=True) for each in (1, 8))
    whole, cut = (model.spec(each).numel for each in runs)
    assert cut == pytest.approx(whole / 8, rel=0.01)
    with pytest.raises(ConfigurationError, match="cannot cut heads 32, kv_heads 8"):
        model.spec(Run(tensor_parallel=3))


def test_a_config_json_is_read_without_transformers(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for given in (tmp_path, tmp_path / "config.json"):
        assert read_model(str(given)).spec(Run()).numel == 142_272


def test_an_encoder_decoder_is_to_be_recorded():
    with pytest.raises(ConfigurationError, match="encoder-decoders included, can be recorded"):
        model_from_config({"model_type": "t5"}, "t5")


@pytest.mark.long
def test_parameters_of_transformers_own_models(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    routed = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    deepseek = {**routed, "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 2}
    deepseek |= {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
    deepseek |= {"v_head_dim": 24, "n_shared_experts": 2, "topk_group": 1}
    kinds = {
        "qwen3": ("Qwen3", {"head_dim": 32}),
        "mixtral": ("Mixtral", {"num_local_experts": 4}),
        "starcoder2": ("Starcoder2", {}),
        "qwen2_moe": (
            "Qwen2Moe",
            {**routed, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2},
        ),
        "qwen3_moe": ("Qwen3Moe", {**routed, "head_dim": 32, "mlp_only_layers": [0]}),
        "deepseek_v2": ("DeepseekV2", {**deepseek, "q_lora_rank": None}),
        "deepseek_v3": ("DeepseekV3", {**deepseek, "q_lora_rank": 12}),
        "llama": ("Llama", {"attention_bias": True}),
        "smollm3": ("SmolLM3", {"pad_token_id": 0}),
        "olmo2": ("Olmo2", {}),
        "granite": ("Granite", {}),
        "gemma2": ("Gemma2", {"head_dim": 32}),
        "gemma3_text": ("Gemma3", {"head_dim": 32}),
        "gpt_oss": ("GptOss", {"num_local_experts": 4, "head_dim": 16, "pad_token_id": 0}),
        "llama4_text": (
            "Llama4",
            {"num_local_experts": 4, "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2}
            | {"head_dim": 16, "pad_token_id": 0},
        ),
    }
    sizes = {key: value for key, value in LLAMA.items() if key != "model_type"}
    for kind, (prefix, more) in kinds.items():
        text = "Text" if kind.endswith("_text") else ""
        config = getattr(transformers, f"{prefix}{text}Config")
        made = config(**{**sizes, **more}, eos_token_id=0, bos_token_id=0)
        with torch.device("meta"):
            model = getattr(transformers, f"{prefix}ForCausalLM")(made)
        theirs = sum(each.numel() for each in model.parameters())
        told = model_from_config(json.loads(made.to_json_string(use_diff=False)), kind)
        assert told.spec(Run()).numel == theirs, kind
        names = {type(each).__name__ for each in model.modules()}
        assert names.issuperset(told.classes), kind


def test_fields_that_a_config_leaves_out_are_those_of_its_class():
    transformers = pytest.importorskip("transformers")
    classes = {
        "llama": "Llama",
        "qwen3": "Qwen3",
        "gemma3_text": "Gemma3Text",
        "gpt_oss": "GptOss",
        "smollm3": "SmolLM3",
        "deepseek_v3": "DeepseekV3",
        "qwen2_moe": "Qwen2Moe",
    }
    for kind, prefix in classes.items():
        made = getattr(transformers, f"{prefix}Config")()
        whole = model_from_config(json.loads(made.to_json_string(use_diff=False)), kind)
        assert model_from_config({"model_type": kind}, kind).shape == whole.shape, kind
    # Llama's key and value heads are as many as the heads, whatever these are.
    few = model_from_config({"model_type": "llama", "num_attention_heads": 16}, "few")
    assert few.shape.kv_heads == 16


def test_of_a_model_that_sees_what_reads_text_is_planned():
    told = {"hidden_size": 5376, "num_hidden_layers": 62, "sliding_window": 1024}
    told |= {"intermediate_size": 21_504, "num_attention_heads": 32, "num_key_value_heads": 16}
    seeing = {"model_type": "gemma3", "text_config": {**told, "head_dim": 128}}
    shape = model_from_config(seeing, "gemma").shape
    assert (shape.vocab, shape.window_in(4), shape.window_in(5)) == (262_208, 1024, 0)
    assert Decoder("gemma", shape).spec(Run()).numel == named_model("gemma3-27b").spec(Run()).numel
    with pytest.raises(ConfigurationError, match="text_config must be an object"):
        model_from_config({"model_type": "llama4", "text_config": 3}, "x")


def test_attention_that_looks_back_within_a_window_is_less_work():
    model = named_model("gemma3-27b")

    def attention(block):
        calls = [each for each in model.calls(Run()) if each.path == model.blocks[block]]
        return next(each for each in calls[0].operations if each.name == "attention").forward.flops

    assert attention(4) * 4 == attention(5)  # 1,024 of 8,192, seen whole, beside half of all


@pytest.mark.parametrize("told", [{"quant_method": "mxfp4"}, "mxfp4"])
def test_quantized_weights_are_refused_by_name(told):
    with pytest.raises(ConfigurationError, match="quantized by mxfp4"):
        model_from_config({**LLAMA, "quantization_config": told}, "x")


@pytest.mark.parametrize(
    ("published", "ours"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama3-8b"),
        ("allenai/OLMo-2-1124-7B", "olmo2-7b"),
        ("google/gemma-2-9b-it", "gemma2-9b"),
        ("ibm-granite/granite-8b-code-base-128k", "granite-8b-code"),
        ("Qwen3-30B-A3B-Base", "qwen3-30b-a3b"),
    ],
)
def test_names_are_understood_as_they_are_published(published, ours):
    assert named_model(published).name == ours


@pytest.mark.parametrize(
    "field", ["n_shared_experts", "first_k_dense_replace", "moe_intermediate_size"]
)
def test_sizes_of_experts_that_cannot_be_are_refused(field):
    told = {**LLAMA, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    with pytest.raises(ConfigurationError, match=field):
        model_from_config({**told, "model_type": "deepseek_v3", field: "two"}, "x")


def test_an_unknown_architecture_is_refused_with_the_nearest():
    with pytest.raises(ConfigurationError, match="did you mean 'mistral'"):
        model_from_config({"model_type": "mistrall"}, "x")
    assert "mistral" in ARCHITECTURES


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": -64}, "hidden_size must be a whole number of at least 1, got -64"),
        ({"num_hidden_layers": 1.5}, "num_hidden_layers must be a whole number"),
        ({"num_key_value_heads": 3}, "cannot share 3 key and value heads evenly"),
        ({"vocab_size": None}, "vocab_size must be a whole number"),
        ({"sliding_window": -4}, "sliding_window must be a whole number of at least 0, got -4"),
        ({"sliding_window": "big"}, "sliding_window must be a whole number"),
        ({"num_hidden_layers": 10**7}, "of more than 4096 no plan"),
        (
            {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 20},
            "a token cannot go to 20 of 8 experts",
        ),
        ({"model_type": "llava", "text_config": {}}, "'llava': a model of several; .* plan_module"),
    ],
)
def test_sizes_that_cannot_be_are_refused(change, said):
    with pytest.raises(ConfigurationError, match=said):
        model_from_config({**LLAMA, **change}, "x")


@pytest.mark.parametrize("text", ["{", "[1]", ""])
def test_a_file_that_is_no_config_is_refused(tmp_path, text):
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match="JSON"):
        read_model(str(file))


def test_a_missing_file_and_an_unknown_name_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="No such file"):
        read_model(str(tmp_path / "config.json"))
    with pytest.raises(ConfigurationError, match="did you mean 'llama3-8b'"):
        read_model("llama3-8")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"micro_batch": 0}, "micro_batch must be a whole number of at least 1, got 0"),
        ({"accumulate": -2}, "accumulate must be"),
        ({"sequence": 1.5}, "sequence must be"),
        ({"optimizer": "adamv"}, "'adamv' is not known"),
        ({"param_dtype": "bf16"}, "unknown dtype 'bf16'"),
        ({"recompute": Recompute.FULL, "recompute_every": 0}, "recompute_every must be"),
    ],
)
def test_runs_that_cannot_be_are_refused(fields, said):
    with pytest.raises(ConfigurationError, match=said):
        Run(**fields)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "prefix", "more"),
    [
        ("llama", "Llama", {}),
        ("gemma", "Gemma", {"head_dim": 32}),
        ("olmo2", "Olmo2", {}),
        ("mixtral", "Mixtral", {"num_local_experts": 8}),
        ("qwen2_moe", "Qwen2Moe", {"num_experts": 8, "shared_expert_intermediate_size": 320}),
        ("deepseek_v3", "DeepseekV3", {"kv_lora_rank": 64, "q_lora_rank": 48, "n_group": 1}),
    ],
)
def test_blocks_of_transformers_keep_what_is_told(kind, prefix, more):
    """The memory of one more block, recorded where backward begins, with experts grouped."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    from fullshard.torch.measuring.record import record_step  # noqa: PLC0415 - needs torch

    samples, length = 2, 256
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8}
    sizes |= {"num_key_value_heads": 8 if "q_lora_rank" in more else 4, "vocab_size": 64}
    sizes |= {"num_experts_per_tok": 2, "moe_intermediate_size": 192, "n_routed_experts": 8}
    sizes |= {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 48, "topk_group": 1}
    sizes |= {"n_shared_experts": 1, "first_k_dense_replace": 0, "use_cache": False, **more}
    sizes |= {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    held = []
    for layers in (1, 2):
        config = getattr(transformers, f"{prefix}Config")(**sizes, num_hidden_layers=layers)
        with torch.device("meta"):
            model = getattr(transformers, f"{prefix}ForCausalLM")(config)
        tokens = torch.empty(samples, length, dtype=torch.long, device="meta")
        recording = record_step(
            model,
            (tokens,),
            loss=lambda out: out.logits.logsumexp(-1).sum(),
            compute_dtype=torch.bfloat16,
        )
        live = 0
        for mark, number in recording.marks:
            if mark.value == "output_gradient":
                break
            size = recording.blocks[number][0] if mark.value in ("allocate", "release") else 0
            live += -size if mark.value == "release" else size
        held.append(live)
    told = model_from_config(json.loads(config.to_json_string(use_diff=False)), kind)
    # Where values are not known, transformers takes a mask for needed.
    masked = AttentionKernel.MASKED
    run = Run(micro_batch=samples, sequence=length, fused_norms=False, attention=masked)
    block = next(each for each in told.calls(run) if each.path == told.blocks[-1])
    kept = sum(each.saved_bytes for each in block.operations)
    assert kept == pytest.approx(held[1] - held[0], rel=0.06)
