# SPDX-License-Identifier: Apache-2.0
"""A finished run's record: corrects a device by what it and its loop reached."""

import json
import math
import tomllib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fullshard.core.errors import ConfigurationError
from fullshard.plan.choose.settings import Setup, with_setting
from fullshard.plan.cluster.cluster import Cluster, Constants, Device
from fullshard.plan.cluster.devices import cluster_of, fitted_constants, fitted_spread, named_device
from fullshard.plan.model.config_json import read_model
from fullshard.plan.model.operations import Model
from fullshard.plan.predict import Prediction, predict
from fullshard.plan.run import Run

_MOST_SLOWER = 20  # than predicted: what is slower yet is another run


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

    Everything takes longer or shorter as the run did, the loop included, but for the part of the
    difference that is expected of one run beside others like it: half of the fitted rows' spread,
    squared, over all that was uncertain; the other half is taken for that of loops. A run that sent
    nothing says nothing of links. The allocator's slack is what makes the peak right, if the record
    has one. A run whose memory was almost full may have waited for the allocator instead, which
    others do not: half of its difference counts.
    Raises `ConfigurationError` for a speed or a peak that no such run can have.
    """
    device = record.cluster.device
    before = device.constants or fitted_constants()
    found = predict(record.model, record.run, record.cluster)
    _refuse_impossible(record, found)
    faster = record.tokens_per_s / found.tokens_per_s
    uncertain = math.log(found.interval.high_s / found.step_s)
    shared = 1 - (fitted_spread() / uncertain) ** 2 / 2
    faster **= shared / 2 if found.almost_full else shared
    links = ("inside_share", "between_share") if found.communication_s else ()
    rates = ("matmul_share", "attention_share", "memory_share", *links)
    times = ("kernel_s", "step_s", "straggle_s")
    constants = replace(
        before,
        **{name: getattr(before, name) * faster for name in rates},
        **{name: getattr(before, name) / faster for name in times},
    )
    slack = device.slack
    if record.reserved_bytes is not None:
        lost = found.memory.peak["allocator slack"]
        held = found.memory.reserved_bytes - lost
        slack += (record.reserved_bytes - held - lost) / held  # what is cut up stays
    return replace(device, constants=constants, slack=slack, assumed=())


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
