# SPDX-License-Identifier: Apache-2.0
import dataclasses

import pytest

from fullshard.core.errors import ConfigurationError
from fullshard.train.config import Config, check_world, describe_options, resolve, to_toml


def test_defaults_then_file_then_overrides(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text('[optim]\nlr = 0.5\nbeta1 = 0.8\n[data]\npaths = ["a", "b"]\n')
    config = resolve(file, ["optim.lr=2e-3", "log.trace=true"])
    assert config.optim.lr == 2e-3
    assert config.optim.beta1 == 0.8
    assert config.optim.beta2 == Config().optim.beta2
    assert config.data.paths == ("a", "b")
    assert config.log.trace is True


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("optim.lr=1", "optim", "lr", 1.0),
        ("train.dtype=bfloat16", "train", "dtype", "bfloat16"),
        ('train.dtype="bfloat16"', "train", "dtype", "bfloat16"),
        ("data.paths=some/folder", "data", "paths", ("some/folder",)),
        ("data.paths=2024", "data", "paths", ("2024",)),
        ('data.paths=["a=b", "c"]', "data", "paths", ("a=b", "c")),
        ("log.name=42", "log", "name", "42"),
        ("log.folder=x=y", "log", "folder", "x=y"),
    ],
)
def test_an_override_is_read_as_its_field_wants_it(override, section, key, value):
    read = getattr(getattr(resolve(overrides=[override]), section), key)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.learning_rate=1", "unknown key 'optim.learning_rate'"),
        ("optim.warmup_step=1", "did you mean 'optim.warmup_steps'?"),
        ("optimm.lr=1", "did you mean 'optim'?"),
        ("optim.lr=fast", "optim.lr must be a number, got 'fast'"),
        ("optim.lr=true", "optim.lr must be a number, got True"),
        ("optim.learning_rate=1", "unknown key 'optim.learning_rate': did you mean 'optim.lr'"),
        ("train.lr=1", "unknown key 'train.lr': did you mean 'optim.lr'"),
        ("train.seed=99999999999999999999999", "train.seed must be at most 2147483647"),
        ("train.steps=" + "9" * 5000, "train.steps must be a whole number"),
        ("optim.lr=inf", "optim.lr must be a number, got inf"),
        ("optim.lr=nan", "optim.lr must be a number, got nan"),
        ("train.steps=1.5", "train.steps must be a whole number, got 1.5"),
        ("train.steps=0", "train.steps must be at least 1, got"),
        ("log.trace=1", "log.trace must be true or false, got 1"),
        ("data.paths=[1, 2]", "data.paths must be a list of texts"),
        ("data.paths=", "data.paths must be a list of texts, none of them empty, got"),
        ("train.dtype=float16", "one of float32, bfloat16"),
        ("model.preset=nanno", "did you mean 'nano'?"),
        ("optim.beta2=1", "optim.beta2 must be below 1"),
        ("shard.strategy=full_shard", "did you mean 'FULL_SHARD'?"),
        ("train.dtype=BF16", "did you mean 'bfloat16'?"),
        ("log.name=../up", "set log.folder for the place"),
        ("log.name=..", "log.name is one folder's name, got '..'"),
        ("log.name=two\nlines", "log.name is one folder's name, got 'two\\nlines'"),
        ("log.folder=two\nlines", "log.folder is a folder's path on one line"),
        ("lr=1", "expected section.key=value"),
        ("optim.lr", "expected section.key=value"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_way_out(override, message):
    with pytest.raises(ConfigurationError) as caught:
        resolve(overrides=[override])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [("lr = 1\n", "'lr' is in no section"), ("[optim\n", "cannot read the settings file")],
)
def test_a_file_that_makes_no_sense_is_refused(tmp_path, text, message):
    file = tmp_path / "settings.toml"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        resolve(file)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"nowhere\.toml"):
        resolve(tmp_path / "nowhere.toml")


def test_the_stored_config_reads_back_equal(tmp_path):
    names = ['log.name=a"b\\c', 'data.paths=["x", "y\\tz"]', "log.trace=true", "optim.lr=1e-7"]
    config = resolve(overrides=names, model="mnist")
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    assert resolve(file) == config


def test_mnist_has_defaults_of_its_own_that_the_user_can_change():
    config = resolve(model="mnist")
    assert config.train.batch != Config().train.batch
    assert resolve(overrides=["train.batch=4"], model="mnist").train.batch == 4
    assert resolve(overrides=["model.name=mnist"]) == config
    assert resolve(overrides=['model.name="mnist"']) == config


def test_a_batch_must_divide():
    config = resolve(overrides=["train.batch=8"])
    check_world(config, 4)
    with pytest.raises(ConfigurationError, match=r"set train\.batch to 6 or 9, or start"):
        check_world(config, 3)
    with pytest.raises(ConfigurationError, match=r"set train\.batch to 16, or"):
        check_world(config, 16)


def test_help_names_every_key():
    text = describe_options()
    for section in dataclasses.fields(Config):
        for key in vars(getattr(Config(), section.name)):
            assert f"{section.name}.{key}=" in text


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().optim.lr = 1.0
