# SPDX-License-Identifier: Apache-2.0
"""Hosts on one machine: network namespaces on a switch, each by a link of limited rate.

Everything, the switch included, lies in namespaces of its own: the machine's network is not
touched, and deleting the namespaces deletes all of it. Needs root and iproute2.
"""

import os
import shutil
import subprocess
import time
from pathlib import Path

DEVICE = "lan0"  # each host's end of its link
PREFIX = "fullshard-lab"
SENT_BYTES = Path(f"/sys/class/net/{DEVICE}/statistics/tx_bytes")  # as seen on a host

PAYLOAD_SHARE = 1448 / 1514
"""The share of a full frame that TCP over IPv4 carries; a link counts the whole frame."""


class Unavailable(Exception):
    """There can be no such hosts here; says why."""


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"{' '.join(command)} failed: {done.stderr.strip() or done.stdout}")
    return done.stdout


def address(host):
    return f"10.77.0.{host + 1}"


class Netlab:
    """``hosts`` hosts, each with a full-duplex link of ``rate_mbit`` Mbit/s to one switch.

    A link is shaped in both directions by a token bucket. Its burst is 1 MB where bytes are
    counted, since a bucket smaller than the packets that TCP hands down makes the kernel cut them,
    which inflates those by their headers; what waits longer than ``latency_ms`` is dropped.

    A context manager: on leaving, however that comes about, programs are ended and namespaces
    deleted. Raises `Unavailable` without root, iproute2 or what the kernel must know.
    """

    def __init__(self, hosts, rate_mbit, latency_ms=50, burst_kb=1024):
        self._switch = f"{PREFIX}-{os.getpid()}-switch"
        self._hosts = [f"{PREFIX}-{os.getpid()}-{host}" for host in range(hosts)]
        self._shape = f"tbf rate {rate_mbit}mbit burst {burst_kb}kb latency {latency_ms}ms".split()
        self._programs = []

    def __enter__(self):
        if os.geteuid():
            raise Unavailable("network namespaces need root; run this as root")
        if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
            raise Unavailable(f"no {' and no '.join(missing)} here; install iproute2")
        _delete_namespaces_of_the_dead()
        try:
            self._build()
        except BaseException:
            self._delete()
            raise
        return self

    def __exit__(self, *_):
        for program in self._programs:
            program.kill()
        for program in self._programs:
            program.wait()
        self._delete()

    def _build(self):
        run("ip", "netns", "add", self._switch)
        run("ip", "-n", self._switch, "link", "add", "switch", "type", "bridge")
        run("ip", "-n", self._switch, "link", "set", "switch", "up")
        for host, name in enumerate(self._hosts):
            port = f"port{host}"
            run("ip", "netns", "add", name)
            ends = ["link", "add", DEVICE, "type", "veth", "peer", "name", port]
            run("ip", "-n", name, *ends, "netns", self._switch)
            run("ip", "-n", self._switch, "link", "set", port, "master", "switch", "up")
            run("ip", "-n", name, "address", "add", f"{address(host)}/24", "dev", DEVICE)
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "link", "set", DEVICE, "up")
            for namespace, device in ((name, DEVICE), (self._switch, port)):
                run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *self._shape)

    def _delete(self):
        for name in (*self._hosts, self._switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def start(self, host, command):
        """Start a program on a host, with Gloo told which device to use."""
        environment = os.environ | {"GLOO_SOCKET_IFNAME": DEVICE, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        inside = ["ip", "netns", "exec", self._hosts[host], *command]
        self._programs.append(subprocess.Popen(inside, env=environment))

    def wait(self):
        """Wait for all programs. Raises `RuntimeError` as soon as one of them fails."""
        while (codes := [program.poll() for program in self._programs]) != [0] * len(codes):
            if any(codes):
                raise RuntimeError(f"programs on hosts ended with {codes} (None: still running)")
            time.sleep(0.2)


def _delete_namespaces_of_the_dead():
    """What a run that was killed outright has left behind."""
    for line in run("ip", "netns", "list").splitlines():
        name = line.split()[0]
        if name.startswith(PREFIX) and not Path("/proc", name.split("-")[2]).exists():
            run("ip", "netns", "delete", name)
