"""Reads blocks of IP addresses, and checks whether they contain the peer of a connection.

`mgpu.settings` reads blocks with it. `mgpu.serving` decides with it which peers may call an endpoint, and which
addresses count as one peer. `is_global_unicast` says to which addresses of Pods a process may connect.
"""

import ipaddress
from collections.abc import Iterable

Block = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
LOOPBACK: tuple[Block, ...] = (ipaddress.IPv4Network("127.0.0.0/8"), ipaddress.IPv6Network("::1/128"))


def read_block(text: str) -> Block:
    """Return the block in `text`, which is in CIDR notation or a single address.

    Raises ValueError with a message for the user, which does not repeat `text`.
    """
    try:
        block = ipaddress.ip_network(text)
    except ValueError as error:
        try:
            wider = ipaddress.ip_network(text, strict=False)
        except ValueError:
            raise ValueError("must be an address or a block such as 192.0.2.0/24 or 2001:db8::/32") from error
        raise ValueError(
            f"is the address of a host with the prefix length of a block; write {wider}, or leave out the prefix length"
        ) from error
    if isinstance(block, ipaddress.IPv6Network) and block.network_address.ipv4_mapped and block.prefixlen >= 96:
        mapped = f"{block.network_address.ipv4_mapped}/{block.prefixlen - 96}"
        raise ValueError(f"is an IPv4 block in IPv6 notation; write {mapped}")
    return block


def read_peer(text: str) -> Address | None:
    """Return the address of a connection's peer, or None if `text` is not an IP address.

    An IPv6 socket reports an IPv4 peer as `::ffff:192.0.2.1`. The result is then the IPv4 address.
    """
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def is_global_unicast(address: Address) -> bool:
    """Return what `IP.IsGlobalUnicast` of Go returns, by which kube-apiserver decides to which Pods it may connect.

    Private addresses are allowed. Addresses of this host and of its link are not, so a Pod with a wrong address cannot
    lead to what listens only there.
    """
    return not (
        address.is_unspecified
        or address.is_loopback
        or address.is_multicast
        or address.is_link_local
        or address == ipaddress.IPv4Address("255.255.255.255")
    )


def is_within(peer: str, blocks: Iterable[Block]) -> bool:
    address = read_peer(peer)
    return address is not None and any(address.version == block.version and address in block for block in blocks)


def counting_block(peer: str) -> Block | None:
    """Return the block of addresses that are counted as one peer, or None if `peer` is not an IP address.

    For IPv4 the block is the address itself. For IPv6 it is a /64, since one host can use every address of it.
    """
    address = read_peer(peer)
    if isinstance(address, ipaddress.IPv6Address):
        return ipaddress.IPv6Network((int(address) >> 64 << 64, 64))
    return ipaddress.IPv4Network(address) if address else None


def cover_everything(blocks: Iterable[Block]) -> bool:
    """Return whether the blocks together contain all IPv4 addresses, or all IPv6 addresses."""
    found = list(blocks)
    v4 = [block for block in found if isinstance(block, ipaddress.IPv4Network)]
    v6 = [block for block in found if isinstance(block, ipaddress.IPv6Network)]
    return any(block.prefixlen == 0 for block in ipaddress.collapse_addresses(v4)) or any(
        block.prefixlen == 0 for block in ipaddress.collapse_addresses(v6)
    )
