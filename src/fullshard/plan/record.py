# SPDX-License-Identifier: Apache-2.0
"""A finished run's record: corrects a device by what it and its loop reached."""

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fullshard.core.errors import ConfigurationError
from fullshard.plan.choose.settings import Setup, with_setting
from fullshard.plan.cluster.cluster import Cluster, Constants, Device
from fullshard.plan.cluster.devices import cluster_of, fitted_runs, named_device
from fullshard.plan.model.config_json import read_model
from fullshard.plan.model.operations import Model
from fullshard.plan.predict import Prediction, predict
from fullshard.plan.run import AttentionKernel, Engine, Run
from fullshard.plan.step.clock import Step, replay
from fullshard.plan.step.interval import LOOP_S, SLOW_HOST, SLOW_INSIDE, assumed_of
from fullshard.plan.step.prices import masked_longer

_MOST_SLOWER = 20  # than predicted: what is slower yet is another run
_WITHIN = 0.17  # a logarithm, that nine in ten runs of one loop differ by (unseen sources' rows)
_TOLD_LINK = 0.2  # a logarithm, that links differ by from what is told of them
_TIMES = ("kernel_s", "step_s", "straggle_s", "straggle_share")


@dataclass(frozen=True)
class Record:
    """A finished run: ``tokens_per_s`` of one device, ``reserved_bytes`` at the peak if known."""

    model: Model
    run: Run
    cluster: Cluster
    tokens_per_s: float
    reserved_bytes: float | None = None


def read_record(path: Path) -> Record:
    """Read a TOML file: ``model``, ``device``, ``devices``, ``tokens_per_s``, ``memory_gib``.

    Beside them any setting of ``fullshard plan``, such as ``micro-batch`` or ``recompute``. Raises
    `ConfigurationError` for a file that cannot be read and for unknown or missing names.
    """
    try:
        table: dict[str, Any] = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is no record: {error}") from error
    missing = sorted({"model", "device", "devices", "tokens_per_s"} - set(table))
    if missing:
        raise ConfigurationError(f"{path} does not say {', '.join(missing)}")
    reached, memory = table.pop("tokens_per_s"), table.pop("memory_gib", None)
    for name, value in (("tokens_per_s", reached), ("memory_gib", memory)):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and 0 < value < 1e12):
            raise ConfigurationError(f"{path}: {name} must be a number above 0, got {value!r}")
    model = read_model(str(table.pop("model")))
    devices = table.pop("devices")
    setup = Setup(Run(), cluster_of(named_device(str(table.pop("device"))), devices))
    for key, value in table.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        setup = with_setting(setup, key, text)
    reserved = None if memory is None else memory * 2**30
    return Record(model, setup.run, setup.cluster, float(reached), reserved)


def corrected(record: Record) -> Device:
    """The record's device with constants of its own: its run is predicted nearly as measured.

    The difference is dealt out over what a prediction cannot know: each of those gets as much as it
    could have changed this run, squared, of all and of what runs of one loop differ by anyhow. So a
    short step tells of its host and loop, a long one of its program, one that waited of its links,
    and each counts in others as far as they depend on it. Bytes of slack are what makes the peak
    right, if the record has one. A run whose memory was almost full may have waited for the
    allocator instead, which others do not: half of its difference counts.
    Raises `ConfigurationError` for a speed or a peak that no such run can have.
    """
    device = record.cluster.device
    found = predict(record.model, record.run, record.cluster)
    _refuse_impossible(record, found)
    longer = math.log(found.tokens_per_s / record.tokens_per_s)
    constants = _longer(found.step, longer / 2 if found.almost_full else longer)
    more = device.slack_bytes
    if record.reserved_bytes is not None:
        more += int(record.reserved_bytes) - found.memory.reserved_bytes
    return replace(device, constants=constants, slack_bytes=more, assumed=())


def _longer(step: Step, longer: float) -> Constants:
    """Return constants with which ``step`` takes nearly ``longer``, a logarithm, more."""
    ways, sign = _ways(step), math.copysign(1.0, longer)

    def changed(shares: Mapping[str, float]) -> Constants:
        fields = asdict(step.constants)
        for names, share in shares.items():
            for name in names.split():
                fields[name] *= math.exp(share if name in _TIMES else -share)
        return Constants(**fields)

    def taken(shares: Mapping[str, float]) -> float:
        seconds = replay(step.script, step.run, step.cluster, changed(shares)).step_s
        return math.log(seconds / step.step_s)

    effects = {names: sign * taken({names: sign * most}) for names, most in ways.items()}
    whole = sum(each**2 for each in effects.values())
    between = max(whole, longer**2 - _WITHIN**2)  # what is far off shows how far one can be
    wanted = longer * between / (between + _WITHIN**2)
    shares = {name: most * effects[name] / whole * wanted for name, most in ways.items()}
    for _ in range(4):
        reached = taken(shares)
        nearer = wanted / reached if reached * wanted > 0 else 1.0
        shares = {name: share * nearer for name, share in shares.items()}
    return changed(shares)


def _ways(step: Step) -> dict[str, float]:
    """By how much more time constants may stand for, as logarithms: nine in ten are within."""
    cluster, run = step.cluster, step.run
    links = {"inside": 1 / SLOW_INSIDE, "between": 1 / cluster.device.slow_between}
    name = "between" if cluster.hosts > 1 else "inside"
    told = name not in (cluster.untold if cluster.hosts > 1 else cluster.device.assumed)
    assumed = [each.later for each in assumed_of(step)]
    masked = masked_longer(cluster.device) if run.attention is AttentionKernel.FLASH else 1.0
    return {
        "matmul_share attention_share memory_share": math.hypot(fitted_runs()[0][1], *assumed),
        "attention_share": math.log(masked),
        "inside_share between_share": _TOLD_LINK if told else math.log(links[name]),
        "kernel_s": math.log(SLOW_HOST) * (3 if run.engine is Engine.OTHER else 1),
        "step_s": math.log1p(LOOP_S / step.constants.step_s),
        "straggle_s straggle_share": _TOLD_LINK,
    }


def _refuse_impossible(record: Record, found: Prediction) -> None:
    """Raise `ConfigurationError` for what no device reaches, or no such run."""
    mfu = found.mfu * record.tokens_per_s / found.tokens_per_s
    if mfu > 1 or mfu < found.mfu / _MOST_SLOWER:
        raise ConfigurationError(
            f"{record.tokens_per_s:,g} tokens/s of one device are {mfu:.3g} of the peak of "
            f"{record.cluster.device.title}, where {found.mfu:.2f} was expected: tokens_per_s is "
            "that of one device, and model, batch and precision are those of the run"
        )
    reserved, most = record.reserved_bytes, record.cluster.device.memory_bytes
    least = found.memory.allocated_bytes / 2
    if reserved is not None and not least <= reserved <= most:
        raise ConfigurationError(
            f"a peak of {reserved / 2**30:,.1f} GiB cannot be this run's on "
            f"{record.cluster.device.title} with {most / 2**30:.1f} GiB: tensors alone take about "
            f"{found.memory.allocated_bytes / 2**30:.1f}; memory_gib is what torch reserved on one "
            "device, and may be left out"
        )


def device_toml(device: Device, origin: str) -> str:
    """Write a device as a file that ``--device FILE.toml`` takes."""
    lines = ["# SPDX-License-Identifier: Apache-2.0", f"[{device.key}]"]
    told = asdict(device) | {"origin": origin}
    constants = told.pop("constants")
    lines += [
        f"{name} = {_value(value)}"
        for name, value in told.items()
        if name != "key" and value is not None
    ]
    if constants is not None:
        names = Constants.__dataclass_fields__
        lines += ["", f"[{device.key}.constants]"]
        lines += [f"{name} = {_value(constants[name])}" for name in names]
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    if isinstance(value, dict):
        inside = ", ".join(f"{name} = {_value(each)}" for name, each in value.items())
        return f"{{ {inside} }}"
    return json.dumps(value, ensure_ascii=False)  # texts, numbers, truths, lists: as in JSON
