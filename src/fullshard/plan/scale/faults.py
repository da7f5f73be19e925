# SPDX-License-Identifier: Apache-2.0
"""Failures of a cluster, and their cost."""

import math
from dataclasses import dataclass

from fullshard.core.errors import ConfigurationError

__all__ = ["Faults"]


@dataclass(frozen=True)
class Faults:
    """Rates and costs of faults; all are estimates, and users know theirs better.

    ``device_mtbf_s`` is the mean time between failures of one device with its share of host and
    network. The default is that of Llama 3's training: 419 unexpected interruptions in 54 days on
    16,384 devices (arXiv:2407.21783, section 3.3.4). ``detect_s`` passes until a failure is
    noticed, ``restart_s`` until the job runs again; loading a checkpoint comes on top.
    ``storage_bandwidth`` is what one device's share of the storage takes and gives, in bytes/s: 2
    TB/s over 16,384 devices there. Of a save ``blocking_share`` holds training up; the rest runs
    beside it, and the save counts only when it is over. A host is slow ``slow_rate`` of the time,
    for ``slow_s`` on end, and everybody is then ``slow_factor`` times as slow.
    """

    device_mtbf_s: float = 54 * 86_400 * 16_384 / 419
    detect_s: float = 120.0
    restart_s: float = 300.0
    storage_bandwidth: float = 2e12 / 16_384
    blocking_share: float = 0.1
    slow_rate: float = 2e-5
    slow_s: float = 1800.0
    slow_factor: float = 1.3

    def __post_init__(self) -> None:
        positive = ("device_mtbf_s", "storage_bandwidth", "slow_s")
        for name in (*positive, "detect_s", "restart_s", "blocking_share", "slow_rate"):
            value = getattr(self, name)
            least = "above 0" if name in positive else "0 or more"
            if math.isnan(value) or value < 0 or (name in positive and value == 0):
                raise ConfigurationError(f"{name} must be {least}, got {value!r}")
        for name in ("blocking_share", "slow_rate"):
            if getattr(self, name) > 1:
                raise ConfigurationError(f"{name} is a share, at most 1, got {getattr(self, name)}")
        if self.slow_factor < 1:
            raise ConfigurationError(f"slow_factor must be at least 1, got {self.slow_factor!r}")

    def mtbf_s(self, devices: int) -> float:
        """Mean seconds between failures of any of ``devices``."""
        return self.device_mtbf_s / devices

    def save_s(self, bytes_per_device: float) -> float:
        """Seconds to write, or to read, what one device keeps."""
        return bytes_per_device / self.storage_bandwidth

    def best_interval_s(self, devices: int, bytes_per_device: float) -> float:
        """Seconds between saves that lose the least, by Young's rule (1974).

        The square root of 2 x the seconds that a save holds training up x the mean time between
        failures; never less than a save takes.
        """
        blocking_s = self.save_s(bytes_per_device) * self.blocking_share
        best = math.sqrt(2 * blocking_s * self.mtbf_s(devices))
        return max(best, self.save_s(bytes_per_device), 1.0)
