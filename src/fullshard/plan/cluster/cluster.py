# SPDX-License-Identifier: Apache-2.0
"""Devices, the links between them, and how many of them there are."""

from collections.abc import Mapping
from dataclasses import dataclass

from fullshard.core.errors import ConfigurationError, check_whole


@dataclass(frozen=True)
class Link:
    """A way between two devices: bytes/s of one device in one direction, seconds to begin."""

    bandwidth: float
    latency_s: float


@dataclass(frozen=True)
class Constants:
    """The constants of the time model that are fitted to published runs, one set for all devices.

    ``matmul_share`` is what training reaches of the best matrix products, ``matmul_ramp`` the
    length of the inner dimension at which a product runs at half speed, ``attention_share`` what
    training reaches of the best attention kernel, ``memory_share`` of the data sheet's memory
    bandwidth, ``inside_share`` and ``between_share`` of links'. While a collective runs, compute
    takes ``contention`` longer. ``kernel_s`` is the host's time for a kernel, ``step_s`` that of a
    step beyond its kernels, and each doubling of the hosts adds
    ``straggle_s`` and ``straggle_share`` of the step, since the slowest is waited for.
    """

    matmul_share: float
    matmul_ramp: float
    attention_share: float
    memory_share: float
    inside_share: float
    between_share: float
    contention: float
    kernel_s: float
    step_s: float
    straggle_s: float
    straggle_share: float


@dataclass(frozen=True)
class Device:
    """One accelerator, or a host's CPU as one rank uses it.

    ``driver`` is the name that drivers have for it, in small letters: a device whose name has all
    its words is this one. ``flops`` are dense peaks in FLOP/s by dtype name, tfloat32 for float32
    in matrix units, ``memory_bytes`` what the driver shows, ``bandwidth`` that of its memory in
    bytes/s, ``host_link`` that to the host's.
    ``sustained`` is the share of the peak that the best large matrix products reach, ``attention``
    that of fused attention kernels over forward and backward with long sequences, of which they
    reach half with ``attention_ramp`` tokens; ``sdpa`` is the one of these that PyTorch picks.
    Grouped products reach ``grouped`` of what plain ones do. ``context_bytes`` is taken by the
    driver's context.
    Hosts have ``per_host`` of it with the links ``inside`` and ``between``, unless a cluster says
    otherwise. ``assumed`` names the fields that nobody has measured, ``origin`` where the others
    come from. A device that was calibrated has ``constants`` of its own. ``fresh`` is the rate in
    bytes/s at which a CPU's system hands out memory; None: buffers are kept between steps.
    ``slack`` is the share of what tensors hold at the peak that torch's allocator reserves besides:
    with it torchtitan's 13 rows of benchmarks/data are told 4% too high on average and at most 4%
    too low, since a run that does not fit costs more than one that is not tried; ``slack_bytes``
    come on top. A link between hosts that nobody tells may have ``slow_between`` of the usual
    bandwidth. With ``own_host`` devices do not share a host's memory, as each Hopper has a Grace.
    """

    key: str
    title: str
    flops: Mapping[str, float]
    sustained: float
    attention: Mapping[str, float]
    memory_bytes: int
    bandwidth: float
    power_w: float
    host_link: float
    per_host: int
    inside: Link
    between: Link
    context_bytes: int
    assumed: tuple[str, ...]
    origin: str
    attention_ramp: float = 0.0
    sdpa: str = "flash2"
    grouped: float = 1.0
    cpu: bool = False
    constants: Constants | None = None
    fresh: float | None = None
    driver: str = ""
    slack: float = 0.08
    slack_bytes: int = 0
    slow_between: float = 0.5
    own_host: bool = False

    def attention_flops(self, kernel: str, dtype: str, length: int) -> float:
        """FLOP/s of the attention ``kernel`` over forward and backward at ``length`` tokens."""
        if kernel not in self.attention:
            known = ", ".join(self.attention)
            raise ConfigurationError(
                f"no attention kernel {kernel} on {self.title}; it has {known}"
            )
        return self.peak(dtype) * self.attention[kernel] * length / (length + self.attention_ramp)

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s of matrix products in ``dtype``."""
        if dtype == "tfloat32" and dtype not in self.flops:
            dtype = "float32"
        try:
            return self.flops[dtype]
        except KeyError:
            known = ", ".join(self.flops)
            raise ConfigurationError(
                f"{self.title} has no matrix units for {dtype}; it has {known}"
            ) from None


@dataclass(frozen=True)
class Cluster:
    """``devices`` equal devices, ``per_host`` of them in each host.

    ``inside`` joins devices of one host, ``between`` those of different hosts: one device's share.
    Those of the two that nobody has told, and which are the device's usual ones, are ``untold``.
    """

    device: Device
    devices: int
    per_host: int
    inside: Link
    between: Link
    untold: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("devices", "per_host"):
            check_whole(name, getattr(self, name))
        if self.devices > self.per_host and self.devices % self.per_host:
            near = self.devices - self.devices % self.per_host
            raise ConfigurationError(
                f"{self.devices} devices do not fill hosts of {self.per_host}: "
                f"take {near} or {near + self.per_host}, or say how many a host has"
            )

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return max(1, self.devices // self.per_host)
