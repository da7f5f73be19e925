# SPDX-License-Identifier: Apache-2.0
"""Every setting of `fullshard train`: frozen dataclasses, filled from TOML and the command line."""

import dataclasses
import difflib
import math
import operator
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import tomli_w

from fullshard.core.errors import ConfigurationError
from fullshard.core.presets import training_flops_per_token, transformer
from fullshard.core.text import did_you_mean

_LIMITS = {
    "least": (operator.ge, "at least"),
    "most": (operator.le, "at most"),
    "below": (operator.lt, "below"),
}


def _option(default: Any, meaning: str, **limits: float) -> Any:
    if type(default) is int:
        limits = {"most": 2**31 - 1, **limits}  # what both engines and NumPy count with
    return field(default=default, metadata={"meaning": meaning, "limits": limits})


@dataclass(frozen=True)
class ModelConfig:
    """The model to train."""

    name: Literal["gpt", "moe", "vlm", "mnist"] = _option(
        "gpt",
        "gpt: predict bytes of text; moe: so with experts, and vlm: with digits beside half of the "
        "texts, both with parts that only some ranks run; mnist: read digits",
    )
    preset: str = _option("nano", "size of the gpt: nano, micro, small, gpt2-124m, llama3-8b, ...")
    context: int = _option(0, "bytes that the gpt sees at once; 0: as the preset says", least=0)
    experts: int = _option(4, "experts in each block of the moe; a byte takes two", least=2)


@dataclass(frozen=True)
class DataConfig:
    """The data to train on."""

    paths: tuple[str, ...] = _option(
        (), "text files or folders; empty: the docs and source of this Python"
    )
    validation_paths: tuple[str, ...] = _option(
        (), "files or folders to validate on; empty: a share of the files"
    )
    validation_share: float = _option(
        0.05, "share of the files that is held back for validation", least=0, most=1
    )
    validation_samples: int = _option(128, "samples in each validation", least=1)


@dataclass(frozen=True)
class OptimConfig:
    """AdamW, its learning rate over the steps, and gradient clipping."""

    lr: float = _option(3e-3, "highest learning rate, reached after the warm-up", least=0)
    warmup_steps: int = _option(60, "steps in which the learning rate rises from 0", least=0)
    final_lr_share: float = _option(0.02, "share of lr that the cosine ends at", least=0, most=1)
    beta1: float = _option(0.9, "decay of the running mean of gradients", least=0, below=1)
    beta2: float = _option(0.95, "decay of the running mean of squared gradients", least=0, below=1)
    weight_decay: float = _option(
        0.1, "weight decay of matrices (norms and biases have none)", least=0
    )
    clip_norm: float = _option(1.0, "largest global norm of the gradients; 0: no clipping", least=0)


@dataclass(frozen=True)
class TrainConfig:
    """The length of the run, its batches, and the engine."""

    engine: Literal["torch", "jax"] = _option("torch", "library that computes; short: --engine")
    steps: int = _option(1000, "optimizer steps", least=1)
    batch: int = _option(8, "samples in a step, over all ranks together", least=1)
    dtype: Literal["float32", "bfloat16"] = _option("float32", "dtype of the parameters")
    seed: int = _option(0, "seed of weights, sample order and dropout", least=0)
    initial_weights: str = _option(
        "", "safetensors file to start from, such as a run's; empty: random from seed"
    )
    eval_every: int = _option(
        250, "steps between validations (the run always ends with one)", least=1
    )
    on_nonfinite: Literal["stop", "skip"] = _option(
        "stop",
        "if a loss or gradient is infinite or NaN on any rank: stop the run, or skip the step",
    )


@dataclass(frozen=True)
class ShardConfig:
    """The division of parameters, gradients and optimizer state over the ranks."""

    strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"] = _option(
        "FULL_SHARD",
        "FULL_SHARD: all; SHARD_GRAD_OP: parameters stay full for backward; NO_SHARD: nothing",
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """When the state of training is kept, to go on from after whatever happens."""

    every: int = _option(0, "steps between checkpoints; 0: none by steps", least=0)
    minutes: float = _option(10.0, "minutes between checkpoints; 0: none by time", least=0)
    keep: int = _option(3, "how many of the newest stay", least=1)
    asynchronous: bool = _option(True, "write them while training goes on")
    resume: str = _option(
        "", "run folder to go on with; auto: this run's newest unfinished one; short: --resume"
    )


@dataclass(frozen=True)
class LogConfig:
    """Output on the terminal and in the run's folder."""

    folder: str = _option("runs", "where run folders are made")
    name: str = _option(
        "", "name of the run folder; empty: model and preset. A number is added if it exists"
    )
    every: int = _option(50, "steps between lines of output", least=1)
    record: bool = _option(
        True, "keep what each rank's steps do in the folder trace, for fullshard report"
    )
    report: bool = _option(False, "say at the end what limits the run, and write report.html")
    to: tuple[str, ...] = _option(
        (), "tensorboard, wandb (offline), mlflow, or module:function, told of all values"
    )
    trace: bool = _option(False, "save the engine's trace of one step as trace.jsonl")
    sample_bytes: int = _option(
        200, "length of the text that the trained gpt writes at the end; 0: none", least=0
    )


@dataclass(frozen=True)
class Config:
    """All settings of one run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    shard: ShardConfig = field(default_factory=ShardConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    @property
    def run_name(self) -> str:
        """The name wanted for the run folder."""
        if self.log.name:
            return self.log.name
        return f"{self.model.name}-{self.model.preset}" if self.of_text else self.model.name

    @property
    def of_text(self) -> bool:
        """True of a model that predicts bytes: all but the one that only reads digits."""
        return self.model.name != "mnist"

    @property
    def context(self) -> int:
        """Tokens the gpt sees at once."""
        return self.model.context or transformer(self.model.preset).context

    @property
    def flops_per_token(self) -> float:
        """FLOPs of a token, or of an image, forward and backward: those of three forwards."""
        if self.of_text:
            shape = transformer(self.model.preset)
            flops = training_flops_per_token(shape, self.context)
            if self.model.name == "moe":  # two experts in place of one feed-forward, and a router
                flops += 6.0 * shape.layers * shape.width * (3 * shape.hidden + self.model.experts)
            if self.model.name == "vlm":  # half of the texts have a picture
                convolutions = 13**2 * 16 * 9 + 6**2 * 32 * 16 * 9
                flops += 3.0 * (convolutions + 32 * 6 * 6 * shape.width) / self.context
            return flops
        convolutions = 26**2 * 32 * 9 + 24**2 * 64 * 32 * 9
        return 3.0 * 2 * (convolutions + 64 * 12 * 12 * 128 + 128 * 10)  # 2: multiply and add


Settings = dict[str, dict[str, Any]]

# Where a model wants other defaults than the gpt does.
_MODEL_DEFAULTS: dict[str, Settings] = {
    "gpt": {},
    "moe": {},
    "vlm": {"model": {"context": 64}, "train": {"batch": 16}},
    "mnist": {
        "train": {"steps": 400, "batch": 64, "eval_every": 100},
        "optim": {"lr": 1e-3, "beta2": 0.999, "weight_decay": 0.01},
        "data": {"validation_samples": 500},
    },
}


def resolve(
    file: str | Path | None = None,
    overrides: Iterable[str] = (),
    model: str | None = None,
    engine: str | None = None,
) -> Config:
    """Return settings of one run: defaults of the model, then ``file`` (TOML), then ``overrides``.

    ``model`` is what ``--model`` gave, the same as ``model.name=``, and ``engine`` what
    ``--engine`` did, the same as ``train.engine=``. Raises `ConfigurationError` for a file that
    cannot be read, an unknown key or a value that does not fit.
    """
    short = {"model.name": model, "train.engine": engine}
    overrides = [*overrides, *(f"{key}={value}" for key, value in short.items() if value)]
    given = _read_toml(Path(file)) if file is not None else {}
    _merge(given, parse_overrides(overrides))
    sections = get_type_hints(Config)
    for section in given:
        if section not in sections:
            raise _unknown("section", section, sections)
    settings: Settings = {}
    _merge(settings, _MODEL_DEFAULTS[_build("model", ModelConfig, given.get("model", {})).name])
    _merge(settings, given)
    built = {name: _build(name, cls, settings.get(name, {})) for name, cls in sections.items()}
    config = Config(**built)
    _check(config)
    return config


def parse_overrides(overrides: Iterable[str]) -> Settings:
    """``["optim.lr=3e-3"]`` as nested settings; a value that is no TOML is taken as text."""
    settings: Settings = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        section, dot, name = key.strip().partition(".")
        if not (equals and dot and section and name):
            raise ConfigurationError(
                f"cannot read {override!r}: expected section.key=value, such as optim.lr=0.003"
            )
        settings.setdefault(section, {})[name] = _Text(text.strip())
    return settings


class _Text(str):
    """A value from the command line: TOML if it can be read as such, else the text itself."""

    def value(self, wanted: Any) -> Any:
        if wanted is str or get_origin(wanted) is Literal:
            quoted = len(self) >= 2 and self[0] == self[-1] and self[0] in "'\""
            return self[1:-1] if quoted else str(self)
        try:
            parsed = tomllib.loads(f"value = {self}")["value"]
        except (ValueError, KeyError, RecursionError):
            parsed = str(self)
        if get_origin(wanted) is tuple and not isinstance(parsed, list):
            return [str(self)]  # one path, even if it reads like a number
        return parsed


def _read_toml(path: Path) -> Settings:
    try:
        read = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"cannot read the settings file {str(path)!r}: {error}") from error
    for section, values in read.items():
        if not isinstance(values, dict):
            raise ConfigurationError(
                f"{path}: {section!r} is in no section; expected [section] and keys below"
            )
    return read


def _merge(into: Settings, more: Mapping[str, Mapping[str, Any]]) -> None:
    for section, values in more.items():
        into.setdefault(section, {}).update(values)


# Words of other trainers for settings.
_ALIASES = {
    "learning_rate": "optim.lr",
    "batch_size": "train.batch",
    "max_steps": "train.steps",
    "iterations": "train.steps",
    "max_grad_norm": "optim.clip_norm",
    "sharding_strategy": "shard.strategy",
    "seq_len": "model.context",
    "output_dir": "log.folder",
}


def _unknown_key(key: str) -> ConfigurationError:
    sections = get_type_hints(Config)
    keys = [
        f"{section}.{name}" for section, cls in sections.items() for name in get_type_hints(cls)
    ]
    section, _, name = key.partition(".")
    known = [known for known in keys if known.startswith(f"{section}.")]
    same = [known for known in keys if known.endswith(f".{name}")]  # in another section
    return _unknown("key", key, known, _ALIASES.get(name) or next(iter(same), None))


def _unknown(
    what: str, name: str, known: Iterable[str], meant: str | None = None
) -> ConfigurationError:
    known = list(known)
    hint = f"did you mean {meant!r}? " if meant else did_you_mean(name, known, 0.4)
    return ConfigurationError(f"unknown {what} {name!r}: {hint}there are {', '.join(known)}")


def _build(section: str, cls: Any, given: Mapping[str, Any]) -> Any:
    """Return a section of the settings; each value fits its field's type and limits."""
    wanted = get_type_hints(cls)
    values = {}
    for name, value in given.items():
        key = f"{section}.{name}"
        if name not in wanted:
            raise _unknown_key(key)
        values[name] = _fit(key, value, wanted[name])
        for limit, bound in cls.__dataclass_fields__[name].metadata["limits"].items():
            holds, words = _LIMITS[limit]
            if not holds(values[name], bound):  # as it is for NaN
                raise ConfigurationError(f"{key} must be {words} {bound}, got {value!r}")
    return cls(**values)


_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def _fit(key: str, value: Any, wanted: Any) -> Any:
    """Return the value as the field's type, if it is one without loss."""
    if isinstance(value, _Text):
        value = value.value(wanted)
    if get_origin(wanted) is Literal:
        choices = get_args(wanted)
        if value in choices:
            return value
        alike = {choice.lower(): choice for choice in choices}
        near = difflib.get_close_matches(str(value).lower(), alike, n=1)
        hint = f" (did you mean {alike[near[0]]!r}?)" if near else ""
        expected = f"one of {', '.join(choices)}{hint}"
    elif get_origin(wanted) is tuple:
        if isinstance(value, list) and all(isinstance(item, str) and item for item in value):
            return tuple(value)
        expected = "a list of texts, none of them empty"
    else:
        if wanted is float and type(value) is int:
            value = float(value) if abs(value) < 2**1000 else math.inf
        if type(value) is wanted and (wanted is not float or math.isfinite(value)):
            return value
        expected = _KINDS[wanted]
    raise ConfigurationError(f"{key} must be {expected}, got {value!r}")


def _check(config: Config) -> None:
    """Refuse settings that contradict each other or name something that does not exist."""
    if config.of_text:
        transformer(config.model.preset)
    if config.train.engine == "jax" and config.model.name in ("moe", "vlm"):
        raise ConfigurationError(
            f"model {config.model.name} has parts that only some ranks run, which the torch engine "
            "alone knows: leave --engine jax out, or train a gpt"
        )
    if config.train.engine == "jax" and config.log.trace:
        raise ConfigurationError("log.trace is kept by the torch engine only: leave it out")
    name, folder = config.run_name, config.log.folder
    if Path(name).name != name or name == ".." or not name.isprintable():
        raise ConfigurationError(
            f"log.name is one folder's name, got {name!r}; set log.folder for the place"
        )
    if not (folder and folder.isprintable()):
        raise ConfigurationError(f"log.folder is a folder's path on one line, got {folder!r}")


def check_world(config: Config, world: int) -> None:
    """Refuse a batch that ``world`` ranks cannot share equally."""
    batch = config.train.batch
    if batch % world:
        lower, upper = batch // world * world, (batch // world + 1) * world
        near = f"{lower} or {upper}" if lower else f"{upper}"
        raise ConfigurationError(
            f"train.batch={batch} samples do not divide over {world} ranks: set train.batch to "
            f"{near}, or start another number of ranks (--nproc)"
        )


def learning_rate(optim: OptimConfig, steps: int, step: int) -> float:
    """Return the rate of ``step`` (from 0): linear warm-up to ``lr``, then a cosine."""
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    progress = (step - optim.warmup_steps) / max(1, steps - 1 - optim.warmup_steps)
    wave = (1 + math.cos(math.pi * min(1.0, progress))) / 2
    return optim.lr * (optim.final_lr_share + (1 - optim.final_lr_share) * wave)


def to_toml(config: Config) -> str:
    """Return all settings as TOML that `resolve` reads back to an equal config."""
    return tomli_w.dumps(dataclasses.asdict(config))


def describe_options() -> str:
    """Return every key with its default and meaning, for ``--help``."""
    lines = []
    for section, cls in get_type_hints(Config).items():
        for option in dataclasses.fields(cls):
            setting = tomli_w.dumps({option.name: option.default}).strip().replace(" = ", "=", 1)
            lines.append(f"  {f'{section}.{setting}':<34} {option.metadata['meaning']}")
    return "\n".join(lines)
