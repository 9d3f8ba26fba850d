"""A name server for tests: UDP, a few names, answers that change when a test says so."""

import asyncio
import socket
import struct
from typing import cast

NXDOMAIN, SERVFAIL = 3, 2
_A = 1


class TinyDns(asyncio.DatagramProtocol):
    """Answers for the names in `zone`: with addresses, with an error, or, where the zone says None, not at all."""

    def __init__(self) -> None:
        self.zone: dict[str, list[str] | int | None] = {}
        self.asked = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, peer: tuple[str, int]) -> None:
        self.asked += 1
        name, end = _name(data)
        kind = struct.unpack_from("!H", data, end)[0]
        found = self.zone.get(name, NXDOMAIN)
        if found is None:
            return
        numbers = found if isinstance(found, list) and kind == _A else []
        code = found if isinstance(found, int) else 0
        head = data[:2] + struct.pack("!HHHHH", 0x8580 | code, 1, len(numbers), 0, 0)
        answers = [
            struct.pack("!HHHIH", 0xC00C, _A, 1, 1, 4) + socket.inet_aton(number) for number in numbers
        ]
        self._transport.sendto(head + data[12 : end + 4] + b"".join(answers), peer)

    def close(self) -> None:
        self._transport.close()


def _name(query: bytes) -> tuple[str, int]:
    """The name that is asked for, and where it ends."""
    labels, at = [], 12
    while length := query[at]:
        labels.append(query[at + 1 : at + 1 + length].decode().lower())
        at += 1 + length
    return ".".join(labels), at + 1


async def serve_dns(host: str, port: int) -> TinyDns:
    """A name server at an address."""
    loop = asyncio.get_running_loop()
    _, server = await loop.create_datagram_endpoint(TinyDns, local_addr=(host, port))
    return server
