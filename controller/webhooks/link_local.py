"""Rejects webhook URLs of link-local and cloud-metadata addresses, which serve credentials."""

import socket
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

METADATA_HOSTS = ("metadata.google.internal", "metadata.goog", "metadata")
NETWORKS: tuple[IPv4Network | IPv6Network, ...] = (
    IPv4Network("169.254.0.0/16"),  # link-local; metadata of AWS, Azure, Google Cloud, Oracle
    IPv4Network("100.100.100.200/32"),  # metadata of Alibaba Cloud
    IPv6Network("fe80::/10"),
    IPv6Network("fd00:ec2::/32"),  # metadata of AWS
    IPv6Network("fd20:ce::/32"),  # metadata of Google Cloud
)
_NAT64 = IPv6Network("64:ff9b::/96")


class LinkLocalRefused(OSError):
    """A host name resolves to a link-local or metadata address."""


def refusal(host: str) -> str:
    """Return why a webhook may not be sent to a host (an address or a name); empty if it may."""
    name = host.rstrip(".").lower()
    if name in METADATA_HOSTS:
        return f"{host} is a cloud's metadata service"
    address = _address(name)
    if address is not None and any(
        address in network for network in NETWORKS if network.version == address.version
    ):
        return f"{host} is a link-local or metadata address"
    return ""


def _address(host: str) -> IPv4Address | IPv6Address | None:
    """Return the address that a host denotes, including one written as a number or as an IPv4-mapped IPv6 address."""
    try:
        found = ip_address(host.partition("%")[0])
    except ValueError:
        try:
            return IPv4Address(socket.inet_aton(host))  # 2852039166, 0xa9fea9fe, 169.254.43518
        except (OSError, UnicodeError):
            return None
    if isinstance(found, IPv6Address):
        within = found in _NAT64
        return (
            found.ipv4_mapped
            or found.sixtofour
            or (IPv4Address(int(found) & 0xFFFFFFFF) if within else found)
        )
    return found
