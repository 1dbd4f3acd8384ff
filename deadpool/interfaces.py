"""Which of this host's addresses others shall use."""

from __future__ import annotations

import ipaddress
import socket

import psutil

_IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


def choose_host(spec: str | None, towards: tuple[str, int] | None) -> str:
    """An address of this host, IPv4 where there are both.

    spec: an interface (hsn0), an address, or a prefix (10.4.0.0/16). Without one: this host's own
    address on the way to `towards` (nothing is sent), else the address of its name. Raises
    ValueError, which says what there is.
    """
    if spec is not None:
        return _find(spec)
    host = _own_address_towards(towards) if towards is not None else None
    return host or _address_of_name()


def interface_of(host: str) -> str:
    """The name of the interface that has an address of this host, and the address."""
    for name, addresses in sorted(_interfaces().items()):
        if host in map(str, addresses):
            return f"{name} ({host})"
    return host


def _find(spec: str) -> str:
    interfaces = _interfaces()
    if spec in interfaces:
        # Link-local addresses mean something on their own link only, and name it by a scope that
        # is called differently on each host.
        found = [a for a in interfaces[spec] if not (a.version == 6 and a.is_link_local)]
    else:
        found = _matching(spec, [a for addresses in interfaces.values() for a in addresses])
    if not found:
        raise ValueError(
            f"--deadpool-interface {spec}: this host has no such interface, address or prefix with "
            f"an address that others can use; it has {_listing(interfaces)}"
        )
    return str(min(found, key=lambda address: address.version))


def _matching(spec: str, addresses: list[_IpAddress]) -> list[_IpAddress]:
    try:
        if "/" not in spec:
            wanted = ipaddress.ip_address(spec)
            return [address for address in addresses if address == wanted]
        network = ipaddress.ip_network(spec, strict=False)
    except ValueError:
        return []
    return [address for address in addresses if address in network]


def _interfaces() -> dict[str, list[_IpAddress]]:
    return {
        name: [
            ipaddress.ip_address(entry.address)
            for entry in entries
            if entry.family in (socket.AF_INET, socket.AF_INET6)
        ]
        for name, entries in psutil.net_if_addrs().items()
    }


def _listing(interfaces: dict[str, list[_IpAddress]]) -> str:
    return ", ".join(
        " ".join((name, *(str(address) for address in addresses)))
        for name, addresses in sorted(interfaces.items())
        if addresses
    )


def _own_address_towards(towards: tuple[str, int]) -> str | None:
    """None where the way is not known."""
    try:
        found = socket.getaddrinfo(*towards, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in sorted(found, key=lambda info: info[0]):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return None


def _address_of_name() -> str:
    name = socket.gethostname()
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(
            f"this host's name {name} has no address ({error}): give --deadpool-interface; there "
            f"are {_listing(_interfaces())}"
        ) from error
    return str(min(found, key=lambda info: info[0])[4][0])
