# SPDX-License-Identifier: Apache-2.0
"""Devices and constants from data files: those that come with the package, and calibrations."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from fullshard.core.errors import ConfigurationError
from fullshard.core.text import did_you_mean
from fullshard.plan.cluster.cluster import Cluster, Constants, Device, Link


def _text(name: str) -> str:
    return resources.files("fullshard.plan.cluster").joinpath(name).read_text("utf-8")


@cache
def _devices() -> dict[str, Device]:
    table = tomllib.loads(_text("devices.toml"))

    def whole(entry: Mapping[str, Any]) -> dict[str, Any]:
        around = whole(table[entry["like"]]) if "like" in entry else {}
        return {**around, **{name: value for name, value in entry.items() if name != "like"}}

    return {key: _device(key, whole(entry)) for key, entry in table.items()}


def _device(key: str, entry: Mapping[str, Any]) -> Device:
    known = {
        field.name: field.default is MISSING for field in fields(Device) if field.name != "key"
    }
    unknown = sorted(set(entry) - set(known))
    missing = sorted(name for name, needed in known.items() if needed and name not in entry)
    if unknown or missing:
        raise ConfigurationError(f"device {key!r}: unknown {unknown}, missing {missing}")
    made = dict(entry)
    for name in ("inside", "between"):
        made[name] = Link(**entry[name])
    made["assumed"] = tuple(entry["assumed"])
    if "constants" in entry:
        made["constants"] = Constants(**{**asdict(fitted_constants()), **entry["constants"]})
    return Device(key=key, **made)


def device_names() -> tuple[str, ...]:
    """The names of all devices that come with the package."""
    return tuple(_devices())


def named_device(name: str) -> Device:
    """The device of that name, or one that a calibration file ``name`` describes.

    Raises `ConfigurationError` with the nearest name if there is none.
    """
    if name.endswith(".toml"):
        return _calibrated(Path(name))
    key = name.lower().replace("_", "-").removesuffix("gb").removesuffix("-sxm")
    key = {"a100": "a100-80", "h100-80": "h100", "a6000": "rtx-a6000"}.get(key, key)
    if key in _devices():
        return _devices()[key]
    hint = did_you_mean(key, _devices(), cutoff=0.4)
    raise ConfigurationError(
        f"unknown device {name!r}: {hint}there are {', '.join(_devices())}, and files that "
        "fullshard calibrate writes"
    )


def device_of_driver(reported: str) -> Device | None:
    """The device of a driver's name such as ``NVIDIA H100 80GB HBM3``, or None if unknown.

    Of several that match it is the one with the most words.
    """
    words = set(re.split(r"[^a-z0-9]+", reported.lower()))
    known = [each for each in _devices().values() if each.driver]
    matching = [each for each in known if words.issuperset(each.driver.split())]
    return max(matching, key=lambda each: len(each.driver.split()), default=None)


def _calibrated(path: Path) -> Device:
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is no calibration file: {error}") from error
    devices = [entry for entry in table.items() if isinstance(entry[1], dict)]
    if len(devices) != 1:
        raise ConfigurationError(f"{path} describes {len(devices)} devices, expected one")
    try:
        return _device(*devices[0])
    except TypeError as error:
        raise ConfigurationError(f"{path} is no calibration file: {error}") from error


def cluster_of(
    device: Device,
    devices: int,
    *,
    per_host: int | None = None,
    inside_bandwidth: float | None = None,
    between_bandwidth: float | None = None,
) -> Cluster:
    """``devices`` of ``device``, joined by its usual links unless others are given in bytes/s."""
    per_host = device.per_host if per_host is None else per_host
    inside, between = device.inside, device.between
    told = {"inside": inside_bandwidth, "between": between_bandwidth}
    untold = tuple(name for name, bandwidth in told.items() if bandwidth is None)
    if inside_bandwidth is not None:
        inside = Link(_positive("inside", inside_bandwidth), inside.latency_s)
    if between_bandwidth is not None:
        between = Link(_positive("between", between_bandwidth), between.latency_s)
    if isinstance(devices, int) and 0 < devices < per_host:
        per_host = devices
    if device.constants is not None:  # it was calibrated
        untold = ()
    return Cluster(device, devices, per_host, inside, between, untold)


def _positive(name: str, value: float) -> float:
    if not 1.0 <= value <= 1e15:
        raise ConfigurationError(
            f"bandwidth {name} hosts must be above 0 (1 to 1e15 bytes/s), got {value!r}"
        )
    return value


@cache
def fitted_constants() -> Constants:
    """The constants that come with the package; the file names the rows of the fit."""
    return Constants(**tomllib.loads(_text("constants.toml"))["constants"])


@cache
def fitted_runs() -> tuple[tuple[float, float], Mapping[str, Sequence[Sequence[float]]]]:
    """Read what a program that is not fitted adds to an interval, and the sizes of runs by kind.

    The first are logarithms: of the sooner end, and of the later.
    """
    table = tomllib.loads(_text("constants.toml"))["interval"]
    return (table["sooner"], table["later"]), table["runs"]


@cache
def fitted_spread() -> float:
    """The logarithm of a 90% interval's half-width, for runs like the fitted ones."""
    return float(tomllib.loads(_text("constants.toml"))["interval"]["spread"])
