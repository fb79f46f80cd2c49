"""Ray nodes in network namespaces of this machine, joined by a bridge whose links have a limited speed.

Each node is a host of its own: a network, a host name, an /etc/hosts and a /dev/shm. It needs root, and `ip`, `tc` and
`unshare` (iproute2, util-linux).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.real.cluster_demo import end

TOOLS = ("ip", "tc", "unshare", "nsenter")
PORT = 6379
"""Of the head, in its own network."""
_NETWORK = "10.83.0"
_BURST = "256kb"
"""Bytes that a link sends at full speed; more than the largest packet of a local link."""
_LATENCY = "200ms"
_OBJECT_STORE = 1_000_000_000
_START_S = 120.0
_STARTED = "Ray runtime started."
_HOST = (
    'hostname "$0" && mount -t tmpfs -o size=3g tmpfs /dev/shm && mount --bind "$1" /etc/hosts && shift && exec "$@"'
)


class NoNetwork(RuntimeError):
    """The nodes cannot be made here, or did not start."""


@dataclass(frozen=True)
class Host:
    """A host of the network."""

    name: str
    namespace: str
    address: str
    hosts: Path
    """Its /etc/hosts."""

    def command(self, *command: str) -> list[str]:
        """`command` as it is started on the host, with a new /dev/shm."""
        on_host = ("unshare", "--uts", "--mount", "sh", "-c", _HOST, self.name, str(self.hosts))
        return ["ip", "netns", "exec", self.namespace, *on_host, *command]


def lacking() -> str:
    """What this user or machine lacks for `network`; empty: nothing."""
    if os.geteuid():
        return "it needs root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"there is no command {', '.join(missing)}" if missing else ""


@contextmanager
def network(names: Sequence[str], gbit: float) -> Iterator[list[Host]]:
    """Hosts with these names, whose links send and receive `gbit` Gbit/s; they are removed with the block.

    Raises:
        NoNetwork: This machine cannot make them.
    """
    mark, bridge = f"troupe-{os.getpid()}", f"tr{os.getpid()}"
    with ExitStack() as made, tempfile.TemporaryDirectory(prefix="hosts-") as folder:
        addresses = {name: f"{_NETWORK}.{number}" for number, name in enumerate(names, start=1)}
        lines = [f"{address} {name}" for name, address in addresses.items()]
        file = Path(folder, "hosts")
        file.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        _call("ip", "netns", "add", mark)  # of the bridge alone: the machine's own network has nothing of this
        made.callback(_call, "ip", "netns", "del", mark)
        _inside(mark, "ip", "link", "add", bridge, "type", "bridge")
        _inside(mark, "ip", "link", "set", bridge, "up")
        hosts: list[Host] = []
        for number, (name, address) in enumerate(addresses.items()):
            namespace, link = f"{mark}-{name}", f"link{number}"
            _call("ip", "netns", "add", namespace)
            made.callback(_call, "ip", "netns", "del", namespace)
            _inside(mark, "ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            _inside(mark, "ip", "link", "set", link, "master", bridge, "up")
            _inside(namespace, "ip", "address", "add", f"{address}/24", "dev", "eth0")
            _inside(namespace, "ip", "link", "set", "lo", "up")
            _inside(namespace, "ip", "link", "set", "eth0", "up")
            limit = ("root", "tbf", "rate", f"{gbit * 1000:.0f}mbit", "burst", _BURST, "latency", _LATENCY)
            _inside(namespace, "tc", "qdisc", "add", "dev", "eth0", *limit)
            _inside(mark, "tc", "qdisc", "add", "dev", link, *limit)
            hosts.append(Host(name, namespace, address, file))
        yield hosts


@contextmanager
def ray_node(host: Host, head: Host, cpus: int, part: str, environment: Mapping[str, str]) -> Iterator[list[str]]:
    """A Ray node on a host, with the label `part`; it joins the one on `head`. It ends with the block.

    Returns:
        The beginning of a command that runs on the host of the node, in this working directory.

    Raises:
        NoNetwork: It did not start in time.
    """
    joins = ("--head", f"--port={PORT}") if host is head else (f"--address={head.address}:{PORT}",)
    with (
        # Ray creates sockets in its folder, and the path of a socket has a length limit.
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as scratch,
        tempfile.NamedTemporaryFile("w+") as output,
    ):
        ray = str(Path(sys.executable).with_name("ray"))
        command = [ray, "start", "--block", "--disable-usage-stats", *joins, f"--node-ip-address={host.address}"]
        command += [f"--temp-dir={scratch}", f"--labels=part={part}", f"--num-cpus={cpus}"]
        command += [f"--object-store-memory={_OBJECT_STORE}"]
        process = subprocess.Popen(
            host.command(*command), env=environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL
        )
        started = psutil.Process(process.pid)
        try:
            deadline = time.monotonic() + _START_S
            while _STARTED not in (said := Path(output.name).read_text()):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise NoNetwork(f"the Ray node {host.name} did not start:\n{said}")
                time.sleep(0.2)
            yield ["nsenter", f"--target={process.pid}", "--net", "--uts", "--mount", "--wd"]
        finally:
            end(started)
            process.wait()


def _inside(namespace: str, *command: str) -> None:
    _call("ip", "netns", "exec", namespace, *command)


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNetwork(f"{' '.join(command)}: {done.stderr.strip()}")
