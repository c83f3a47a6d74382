"""Reads blocks of IP addresses, and matches the peers of connections against them.

`mgpu.settings` parses the setting `apiServers` with this module. `mgpu.serving` uses it to decide whether a peer may
call an endpoint, and to count the connections of each block.
"""

import ipaddress
from collections.abc import Iterable

Block = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
LOOPBACK: tuple[Block, ...] = (ipaddress.IPv4Network("127.0.0.0/8"), ipaddress.IPv6Network("::1/128"))


def read_block(text: str) -> Block:
    """Return the block in CIDR notation or the single address in `text`. The ValueError states the remedy."""
    try:
        block = ipaddress.ip_network(text)
    except ValueError as error:
        try:
            wider = ipaddress.ip_network(text, strict=False)
        except ValueError:
            raise ValueError("must be an address or a block such as 192.0.2.0/24 or 2001:db8::/32") from error
        raise ValueError(
            f"is the address of a host with the prefix length of a block; write {wider}, or leave out the /…"
        ) from error
    if isinstance(block, ipaddress.IPv6Network) and block.network_address.ipv4_mapped and block.prefixlen >= 96:
        mapped = f"{block.network_address.ipv4_mapped}/{block.prefixlen - 96}"
        raise ValueError(f"is an IPv4 block in IPv6 notation; write {mapped}")
    return block


def read_peer(text: str) -> Address | None:
    """Return the address of a connection's peer, or None for a peer without an IP address.

    An IPv6 socket reports its IPv4 peers as `::ffff:192.0.2.1`; their IPv4 address is returned.
    """
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def is_within(peer: str, blocks: Iterable[Block]) -> bool:
    """Return whether one of the blocks contains the peer's address."""
    address = read_peer(peer)
    return address is not None and any(address.version == block.version and address in block for block in blocks)


def counting_block(peer: str) -> Block | None:
    """Return the block whose connections share a limit with those of this peer; None for a peer without an IP address.

    For IPv6 it is the peer's /64 block, since one host can use every address of it.
    """
    address = read_peer(peer)
    if isinstance(address, ipaddress.IPv6Address):
        return ipaddress.IPv6Network((int(address) >> 64 << 64, 64))
    return ipaddress.IPv4Network(address) if address else None


def cover_everything(blocks: Iterable[Block]) -> bool:
    """Return whether the blocks together contain all IPv4 or all IPv6 addresses."""
    found = list(blocks)
    v4 = [block for block in found if isinstance(block, ipaddress.IPv4Network)]
    v6 = [block for block in found if isinstance(block, ipaddress.IPv6Network)]
    return any(block.prefixlen == 0 for block in ipaddress.collapse_addresses(v4)) or any(
        block.prefixlen == 0 for block in ipaddress.collapse_addresses(v6)
    )
