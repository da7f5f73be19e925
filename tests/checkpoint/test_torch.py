# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of all that torch users train: kinds of models, state beside them, and failures."""

import random
import warnings

import numpy
import pytest
import torch
from checkpoint.test_torch_resize import build, everything, train
from support.checkpoint_cases import names_in
from support.models import GPT, seeded
from support.threads import on_ranks
from torch import nn

from fullshard.checkpoint import Files, open_checkpoint, planning
from fullshard.core.errors import CheckpointError, ConfigurationError
from fullshard.testing import LocalWorld
from fullshard.torch import (
    Background,
    FullyShardedDataParallel,
    Keep,
    RunFolder,
    load_checkpoint,
    save_checkpoint,
)


def on(world, body):
    return LocalWorld(world).run(body)


def wrap(comm, model, **options):
    return FullyShardedDataParallel(model, comm, **options)


def gpt(seed=0, **options):
    return seeded(lambda: GPT(**options), seed).double()


def one_step(model, optimizer, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(17, (2, 6), generator=generator)
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def assert_equal(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("door", ["wrapper", "function"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD"])
def test_all_ranks_tell_the_same_rules(tmp_path, monkeypatch, strategy, door):
    told = []
    plain = planning._Decision.__init__

    def noted(self, groups, listed):
        told.append(
            (len(groups), {each[0] for part in listed for each in part if 0 not in each[1]})
        )
        plain(self, groups, listed)

    monkeypatch.setattr(planning._Decision, "__init__", noted)

    def body(comm):
        model, optimizer = build(comm, strategy, door)
        train(comm, model, optimizer, range(1))
        save_checkpoint(tmp_path, model, optimizer, step=1)

    on(4, body)
    assert told == [(1, {f"random/{rank}" for rank in range(4)})]


def test_a_plain_module_in_one_process(tmp_path):
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    one_step(model, optimizer)
    folder = save_checkpoint(tmp_path, model, optimizer, step=3, extra="here").wait()
    assert folder == tmp_path / "step-000000000003"
    held = everything(model, optimizer)
    after = one_step(model, optimizer, 1)
    other = gpt(1)
    fresh = torch.optim.AdamW(other.parameters(), lr=0.7)
    loaded = load_checkpoint(tmp_path, other, fresh)
    assert (loaded.step, loaded.extra, loaded.world) == (3, "here", 1)
    assert fresh.param_groups[0]["lr"] == 0.1
    assert fresh.param_groups[0]["betas"] == (0.9, 0.999)
    assert_equal(held, everything(other, fresh))
    assert one_step(other, fresh, 1) == after


def test_tied_weights_are_stored_once_and_reach_models_that_do_not_tie(tmp_path):
    def body(comm):
        model = wrap(comm, gpt(tied=True))
        save_checkpoint(tmp_path, model, step=1)
        tied = everything(model, torch.optim.SGD(model.parameters()))
        other = wrap(comm, gpt(1, tied=False))
        load_checkpoint(tmp_path, other)
        assert_equal(tied, everything(other, torch.optim.SGD(other.parameters())))
        again = wrap(comm, gpt(2, tied=True))
        load_checkpoint(tmp_path, again)
        assert_equal(tied, everything(again, torch.optim.SGD(again.parameters())))

    on(2, body)
    manifest = open_checkpoint(tmp_path).manifest
    assert dict(manifest.aliases) == {"model/head.weight": "model/embed.weight"}
    assert "model/head.weight" not in manifest.tensors


def adapted(seed):
    """A frozen model with trainable adapters, in mixed precision."""

    def build():
        base = nn.Linear(6, 6).bfloat16().requires_grad_(False)
        return nn.ModuleDict({"base": base, "down": nn.Linear(6, 2), "up": nn.Linear(2, 6)})

    return seeded(build, seed)


def test_trainable_weights_only(tmp_path):
    def body(comm):
        model = wrap(comm, adapted(0), use_orig_params=True)
        save_checkpoint(tmp_path, model, step=1, trainable_only=True)
        other = wrap(comm, adapted(1), use_orig_params=True)
        before = other.base.weight.full_tensor()
        load_checkpoint(tmp_path, other)
        assert torch.equal(other.base.weight.full_tensor(), before)
        assert torch.equal(other.up.weight.full_tensor(), model.up.weight.full_tensor())

    on(2, body)
    stored = {name for name in open_checkpoint(tmp_path).manifest.tensors if "random" not in name}
    assert stored == {
        f"model/{part}.{kind}" for part in ("up", "down") for kind in ("weight", "bias")
    }


def test_several_models_and_optimizers_and_a_copy_of_averages(tmp_path):
    def make(seed):
        models = {"policy": gpt(seed), "value": gpt(seed + 1, blocks=1), "ema": gpt(seed + 2)}
        optimizers = {
            name: torch.optim.AdamW(models[name].parameters()) for name in ("policy", "value")
        }
        for name, optimizer in optimizers.items():
            one_step(models[name], optimizer)
        return models, optimizers

    models, optimizers = make(0)
    save_checkpoint(tmp_path, models, optimizers, step=1)
    others, fresh = make(5)
    load_checkpoint(tmp_path, others, fresh)
    for name, model in models.items():
        assert_equal(dict(model.state_dict()), dict(others[name].state_dict()))
    for name in optimizers:
        assert_equal(
            everything(models[name], optimizers[name]), everything(others[name], fresh[name])
        )
    with pytest.raises(ConfigurationError, match="without '/'"):
        save_checkpoint(tmp_path, {"a/b": gpt()}, step=2)
    with pytest.raises(ConfigurationError, match="in none of the models"):
        save_checkpoint(tmp_path, models["value"], optimizers["policy"], step=2)


def test_state_beside_the_model(tmp_path):
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer.step()
    cosine.step()
    extra = {
        "plateau": scheduler.state_dict(),
        "cosine": cosine.state_dict(),
        "scaler": scaler.state_dict(),
        "average": torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
        "numpy": numpy.float32(0.5),
        "nothing": torch.empty(0, 3),
        "position": 7,
    }
    save_checkpoint(tmp_path, model, optimizer, step=1, extra=extra)
    found = load_checkpoint(tmp_path, model, optimizer).extra
    for name in ("average", "nothing"):
        assert torch.equal(found.pop(name), extra.pop(name))
    assert found == extra
    scheduler.load_state_dict(found["plateau"])
    assert scheduler.best == float("inf")
    with pytest.raises(ConfigurationError, match=r"extra\['huge'\]|too much"):
        save_checkpoint(tmp_path, model, step=2, extra={"huge": torch.zeros(10**6)})
    with pytest.raises(ConfigurationError, match=r"extra\['f'\] is a builtins.function"):
        save_checkpoint(tmp_path, model, step=2, extra={"f": lambda: 0})
    assert names_in(tmp_path) == ["step-000000000001"]


def test_random_states_of_all_ranks_come_back(tmp_path):
    model = gpt()
    save_checkpoint(tmp_path, model, step=1)
    expected = random.random(), numpy.random.rand(), torch.rand(3)
    loaded = load_checkpoint(tmp_path, model)
    assert loaded.restore_random_state()
    found = random.random(), numpy.random.rand(), torch.rand(3)
    assert found[:2] == expected[:2]
    assert torch.equal(found[2], expected[2])

    def body(comm):
        loaded = load_checkpoint(tmp_path, wrap(comm, gpt()))
        return loaded.set_random_state is not None

    assert on(3, body) == [True, False, False]


class Counting(nn.Module):
    """A module with buffers, one of which is not stored, and extra state that is no tensor."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6)[:, ::2])  # not contiguous
        self.register_buffer("count", torch.tensor([3, 4]))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.seen = 0

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


def test_buffers_extra_state_and_memory_that_is_not_contiguous(tmp_path):
    model = nn.Sequential(Counting())
    model[0].seen = 5
    model[0].count += 1
    save_checkpoint(tmp_path, model, step=1)
    other = nn.Sequential(Counting())
    load_checkpoint(tmp_path, other)
    assert other[0].seen == 5
    assert_equal(
        {"weight": model[0].weight, "count": model[0].count},
        {"weight": other[0].weight, "count": other[0].count},
    )


def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path):
    model = gpt()
    save_checkpoint(tmp_path, model, step=1)
    larger, wider = gpt(1, blocks=3), gpt(1, width=16)
    before = {name: each.clone() for name, each in larger.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"lacks model/blocks\.2\.norm1.* and 6 more"):
        load_checkpoint(tmp_path, larger)
    with pytest.raises(CheckpointError, match=r"'model/embed.weight' has shape \(17, 12\)"):
        load_checkpoint(tmp_path, wider)
    with pytest.raises(CheckpointError, match=r"has model/blocks\.1"):
        load_checkpoint(tmp_path, gpt(1, blocks=1))
    with pytest.raises(CheckpointError, match="has no optimizer 'optimizer'"):
        load_checkpoint(tmp_path, model, torch.optim.SGD(model.parameters()))
    with pytest.raises(CheckpointError, match="no complete checkpoint of step 2"):
        load_checkpoint(tmp_path, model, step=2)
    assert_equal(before, dict(larger.state_dict()))
    loaded = load_checkpoint(tmp_path, larger, strict=False)
    assert len(loaded.missing) == 11
    assert loaded.unexpected == ()
    assert torch.equal(larger.head.weight, model.head.weight)
    assert torch.equal(
        larger.blocks[2].attention.out.weight, before["blocks.2.attention.out.weight"]
    )


def test_groups_that_do_not_fit_are_refused(tmp_path):
    model = gpt()
    params = list(model.parameters())
    save_checkpoint(tmp_path, model, torch.optim.AdamW(params), step=1)
    split = torch.optim.AdamW([{"params": params[:2]}, {"params": params[2:]}])
    with pytest.raises(CheckpointError, match="groups of 'optimizer' have other parameters"):
        load_checkpoint(tmp_path, model, split)
    with pytest.raises(ConfigurationError, match="step is a whole number"):
        save_checkpoint(tmp_path, model, step=-1)


def test_another_kind_of_optimizer_is_refused_and_a_kin_is_not(tmp_path):
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    one_step(model, optimizer)
    save_checkpoint(tmp_path, model, optimizer, step=1)
    for kind, setting in (
        (torch.optim.SGD, "'momentum'"),
        (torch.optim.RMSprop, "'alpha'"),
        (torch.optim.Adagrad, "'lr_decay'"),
    ):
        other = kind(model.parameters())
        with pytest.raises(CheckpointError, match=f"AdamW and is {kind.__name__} .*{setting}"):
            load_checkpoint(tmp_path, model, other)
        assert not any("exp_avg" in state for state in other.state.values())
        assert "betas" not in other.param_groups[0]
    kin = torch.optim.Adam(model.parameters(), foreach=False)
    load_checkpoint(tmp_path, model, kin)
    assert kin.param_groups[0]["lr"] == 0.1


def test_two_tensors_are_not_taken_for_one_in_silence(tmp_path):
    def two(tied):
        first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        if tied:
            second.weight = first.weight
        return nn.Sequential(first, second)

    apart = two(tied=False)
    save_checkpoint(tmp_path, apart, step=1)
    with pytest.raises(CheckpointError, match=r"'model/0.weight' and 'model/1.weight' are one"):
        load_checkpoint(tmp_path, two(tied=True))
    load_checkpoint(tmp_path, (together := two(tied=True)), strict=False)
    assert torch.equal(together[1].weight, apart[0].weight)
    alone = nn.Sequential(nn.Linear(2, 2, bias=False))  # as others leave one of the names out
    save_checkpoint(tmp_path / "alone", alone, step=1)
    assert load_checkpoint(tmp_path / "alone", (together := two(tied=True))).missing == ()
    assert torch.equal(together[1].weight, alone[0].weight)
    with pytest.raises(CheckpointError, match=r"lacks model/1\.weight"):
        load_checkpoint(tmp_path / "alone", apart)
    apart[1].weight.data.copy_(apart[0].weight)  # equal, as some files hold tied weights
    save_checkpoint(tmp_path, apart, step=2)
    load_checkpoint(tmp_path, two(tied=True))


@pytest.mark.parametrize(
    "extra", [10**5000, (loop := []).append(loop) or loop, {"state": {"set"}}], ids=lambda _: ""
)
@on_ranks(2)
def test_what_could_not_be_read_back_is_refused_on_all_ranks(comm, tmp_path, extra):
    model = wrap(comm, seeded(lambda: nn.Linear(2, 2)))
    with pytest.raises((ConfigurationError, CheckpointError), match="step 1 cannot be saved"):
        save_checkpoint(tmp_path, model, step=1, extra=extra if comm.rank else None)
    save_checkpoint(tmp_path, model, step=1)


def flip_last_byte(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_damage_is_found_before_anything_is_changed_and_fallback_is_loud(tmp_path):
    def save(comm):
        model, optimizer = build(comm, "FULL_SHARD", "wrapper")
        for step in (1, 2):
            train(comm, model, optimizer, range(1))
            save_checkpoint(tmp_path, model, optimizer, step=step)

    on(2, save)
    flip_last_byte(tmp_path / "step-000000000002" / "00001.safetensors")

    def load(comm):
        model, optimizer = build(comm, "FULL_SHARD", "wrapper", seed=1)
        train(comm, model, optimizer, range(1))
        before = everything(model, optimizer)
        with pytest.raises(CheckpointError, match="do not match their checksum") as caught:
            load_checkpoint(tmp_path, model, optimizer)
        assert caught.value.file.endswith("00001.safetensors")
        assert_equal(before, everything(model, optimizer))
        return load_checkpoint(tmp_path, model, optimizer, fallback=True).step

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert on(2, load) == [1, 1]
    assert any("falling back to step 1" in str(each.message) for each in told)


class Failing(Files):
    """Fails from the moment it is told to."""

    def __init__(self):
        self.broken = False

    def flush(self, file):
        if self.broken:
            raise OSError(28, "No space left on device", str(file.path))
        super().flush(file)


def test_a_save_aside_goes_on_while_training_does(tmp_path):
    def body(comm):
        model, optimizer = build(comm, "FULL_SHARD", "wrapper")
        train(comm, model, optimizer, range(2))
        held = everything(model, optimizer)
        saving = save_checkpoint(tmp_path, model, optimizer, step=2, asynchronous=True)
        train(comm, model, optimizer, range(2, 4))
        saving.wait()
        load_checkpoint(tmp_path, model, optimizer)
        assert_equal(held, everything(model, optimizer))
        second = save_checkpoint(tmp_path, model, optimizer, step=3, asynchronous=True)
        save_checkpoint(tmp_path, model, optimizer, step=4)
        assert second.done

    on(2, body)
    assert open_checkpoint(tmp_path).step == 4


def test_a_failure_aside_comes_out_on_every_rank_at_the_next_call(tmp_path):
    def body(comm):
        files = Failing()
        run = RunFolder(tmp_path, keep=Keep(last=1), background=Background(2**25), files=files)
        model = wrap(comm, gpt())
        save_checkpoint(run, model, step=1, asynchronous=True).wait()
        files.broken = comm.rank == 1
        save_checkpoint(run, model, step=2, asynchronous=True)
        with pytest.raises(CheckpointError, match=r"step 2 was not saved.*No space left"):
            save_checkpoint(run, model, step=3)
        for waiting in ([0], [0, 1]):
            saving = save_checkpoint(run, model, step=3, asynchronous=True)
            if comm.rank in waiting:
                with pytest.raises(CheckpointError, match="step 3 was not saved"):
                    saving.wait()
            if waiting == [0]:  # one rank does not know yet
                with pytest.raises(CheckpointError, match="step 3 was not saved"):
                    load_checkpoint(run, model)
            else:
                assert load_checkpoint(run, model).step == 1
        files.broken = False
        save_checkpoint(run, model, step=4, asynchronous=True)
        with pytest.raises(CheckpointError, match="no complete checkpoint of step 2"):
            load_checkpoint(run, model, step=2)

    on(2, body)
    kept = names_in(tmp_path)
    assert kept == ["step-000000000001", "step-000000000004"]  # a load has verified the first
