"""Which address of several a host is known by."""

from __future__ import annotations

import socket
from typing import NamedTuple

import psutil
import pytest

from deadpool.interfaces import choose_host


class Entry(NamedTuple):
    """As psutil's, as far as it is used."""

    family: int
    address: str


@pytest.fixture(autouse=True)
def host_with_several(monkeypatch: pytest.MonkeyPatch) -> None:
    v4, v6, link = socket.AF_INET, socket.AF_INET6, 17
    interfaces = {
        "lo": [Entry(v4, "127.0.0.1"), Entry(v6, "::1"), Entry(link, "00:00:00:00:00:00")],
        "eth0": [Entry(v6, "fe80::1%eth0"), Entry(v6, "fd00::2"), Entry(v4, "192.0.2.2")],
        "hsn0": [Entry(v4, "10.4.1.7"), Entry(v4, "10.4.1.8")],
        "hsn1": [Entry(v6, "fe80::2%hsn1"), Entry(v6, "fd01::2")],
        "ib0": [Entry(link, "02:fc:00:00:00:01")],
        "usb0": [Entry(v6, "fe80::3%usb0")],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)


@pytest.mark.parametrize(
    ("spec", "host"),
    [
        ("lo", "127.0.0.1"),
        ("eth0", "192.0.2.2"),
        ("hsn0", "10.4.1.7"),
        ("hsn1", "fd01::2"),
        ("10.4.1.8", "10.4.1.8"),
        ("fd00:0::2", "fd00::2"),
        ("fe80::3%usb0", "fe80::3%usb0"),
        ("10.4.0.0/16", "10.4.1.7"),
        ("10.4.1.8/31", "10.4.1.8"),
        ("10.4.9.9/16", "10.4.1.7"),
        ("192.0.2.0/24", "192.0.2.2"),
        ("fd01::/64", "fd01::2"),
    ],
)
def test_spec_of_every_form_finds_the_address(spec: str, host: str) -> None:
    assert choose_host(spec, ("192.0.2.1", 1)) == host


@pytest.mark.parametrize(
    "spec",
    [
        "hsn9",
        "",
        "ib0",
        "usb0",
        "10.4.1.9",
        "10.5.0.0/16",
        "10.4.0.0/33",
        "/",
        "fd02::/64",
        "0.0.0.0",
    ],
)
def test_spec_that_fits_nothing_raises_value_error_with_what_there_is(spec: str) -> None:
    with pytest.raises(ValueError, match=f"--deadpool-interface {spec}: ") as error:
        choose_host(spec, None)
    for there in ("hsn0 10.4.1.7 10.4.1.8", "lo 127.0.0.1 ::1", "eth0 fe80::1%eth0"):
        assert there in str(error.value)
    assert "ib0 " not in str(error.value).split("it has")[1]


@pytest.mark.parametrize(("there", "host"), [("127.0.0.9", "127.0.0.1"), ("::1", "::1")])
def test_no_spec_takes_the_own_address_on_the_way(there: str, host: str) -> None:
    assert choose_host(None, (there, 1)) == host


@pytest.mark.parametrize("towards", [None, ("no-such-host.invalid", 1)])
def test_no_spec_and_no_way_takes_the_names_address_ipv4_first(
    towards: tuple[str, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(name: str, port: int | None, **_: object) -> list[tuple[object, ...]]:
        if name != "node7":
            raise socket.gaierror("unknown")
        return [
            (socket.AF_INET6, 1, 6, "", ("fd01::2", 0, 0, 0)),
            (socket.AF_INET, 1, 6, "", ("10.4.1.7", 0)),
        ]

    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert choose_host(None, towards) == "10.4.1.7"


def test_no_spec_and_no_address_of_the_name_says_what_to_give(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def resolve(*_: object, **__: object) -> None:
        raise socket.gaierror("unknown")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(
        ValueError, match=r"give --deadpool-interface; there are .*hsn0 10\.4\.1\.7"
    ):
        choose_host(None, None)
