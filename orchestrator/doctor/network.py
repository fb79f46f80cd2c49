"""Checks of network, clock, container and the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator

from troupe.orchestrator.doctor.machine import Finding, Machine, Needs

_OLDEST_YEAR, _NEWEST_YEAR = 2025, 2100
_DRIFT_S = 1.0
_FEW_PORTS = 1000
"""Ray's processes and the trainers' rendezvous take a few dozen ports on a node, and every worker a few."""


def check_network(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """Loopback, ports and proxies: Ray's processes talk over 127.0.0.1."""
    around = machine.surroundings
    findings: list[Finding] = []
    if around.loopback:
        remedy = "bring it up (ip link set lo up), and allow connections on lo in the firewall"
        findings.append(Finding("network", "problem", f"no connection to 127.0.0.1: {around.loopback}", remedy))
    if around.ports < _FEW_PORTS:
        remedy = "sysctl -w net.ipv4.ip_local_port_range='32768 60999'"
        found = f"the kernel hands out only {around.ports} ports"
        findings.append(Finding("network", "problem", found, remedy))
    if around.proxy:
        found = f"{around.proxy} also applies to 127.0.0.1: Ray's connections go through the proxy"
        findings.append(Finding("network", "note", found, "export no_proxy=localhost,127.0.0.1"))
    if around.ray_port_taken:
        found = "port 6379 is in use, by Ray's head or another program; troupe run starts a Ray of its own beside it"
        remedy = "to use the running Ray: troupe run SPEC --address auto"
        findings.append(Finding("network", "note", found, remedy))
    yield from findings
    if not findings:
        yield Finding("network", "ok", f"127.0.0.1 answers, {around.ports} ports")


def check_clock(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """Wall clock."""
    around = machine.surroundings
    if not _OLDEST_YEAR <= around.year <= _NEWEST_YEAR:
        found = f"the clock says {around.year}: certificates and timestamps are wrong"
        yield Finding("clock", "problem", found, "timedatectl set-ntp true")
    elif abs(around.clock_drift) > _DRIFT_S:
        found = f"the wall clock jumped by {around.clock_drift:.1f} s during the checks: timestamps are wrong"
        yield Finding("clock", "note", found, "timedatectl set-ntp true, and no second program that sets the clock")
    else:
        yield Finding("clock", "ok", f"{around.year}, steady")


def check_container(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """Whether limits and remedies are those of a container."""
    kind = machine.surroundings.container
    yield Finding("container", "ok", f"inside a container ({kind})" if kind else "none")


def check_hub(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """The Hugging Face cache, and whether a token is there (never which)."""
    around = machine.surroundings
    token = "a token is set" if around.hub_token else "no token (gated models need one: HF_TOKEN)"
    found = f"cache {around.hub_cache}, {token}" + (", offline" if around.hub_offline else "")
    if around.hub_cache_writable:
        yield Finding("hub", "ok", found)
    else:
        found = f"the cache {around.hub_cache} cannot be written: nothing can be downloaded"
        yield Finding("hub", "note", found, "export HF_HOME=/a/folder/that/you/can/write")
