"""Addresses: which stay on this machine and need neither keys nor a token, which can be used, and how they are shown."""

import re
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from urllib.parse import urlsplit, urlunsplit

_HIGHEST_PORT = 65_535
_MOST_PATH_BYTES = 107
"""Of a Unix socket: longer ones do not fit into the kernel's own record of it."""

_HOST = re.compile(r"[^\W_][\w.-]*")


def is_loopback(address: str) -> bool:
    """Whether an address, given as host or as URL, can only be reached from, and only reaches, this machine."""
    if address.startswith(("ipc://", "inproc://", "file://")):
        return True
    place = address.split("://")[-1]
    if place.count(":") > 1 and not place.startswith("["):
        place = f"[{place}]"  # an IPv6 host alone, whose colons set no port apart
    try:
        host = urlsplit(f"//{place}").hostname or ""
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def server_address_problem(address: str) -> str:
    """What is wrong with the address of an env server that is to be connected to; empty if nothing is.

    Stricter than ZMQ, which takes ports that there are not and then tries for ever without a word.
    """
    kind, _, place = address.partition("://")
    if kind == "ipc" and place and place != "*" and not re.search(r"\s", place):
        if (size := len(place.encode())) > _MOST_PATH_BYTES:
            return f'"{address}": the path has {size} bytes, and that of a socket {_MOST_PATH_BYTES} at most'
        return ""
    host, colon, port = place.rpartition(":")
    if kind != "tcp" or not colon or not _is_host(host) or not host.isascii():
        return f'"{address}" is not an address like tcp://10.0.0.7:7000, tcp://[fd00::7]:7000 or ipc:///path'
    return "" if _is_port(port) else f'"{address}": {_wrong_port(port)}'


def base_url_problem(url: str) -> str:
    """What is wrong with the base URL of an inference server; empty if nothing is."""
    if not url.startswith(("http://", "https://")):
        return f'"{url}" is not an http:// or https:// address'
    place = re.split(r"[/?#]", url.partition("://")[2], maxsplit=1)[0].rpartition("@")[2]
    host, colon, port = place.rpartition(":") if not place.endswith("]") else (place, "", "")
    if not _is_host(host if colon else place) or re.search(r"\s", url):
        return f'"{shown_url(url)}" names no host; write for example "http://10.0.0.7:8000/v1"'
    if colon and not _is_port(port):
        return f'"{shown_url(url)}": {_wrong_port(port)}'
    if not url.partition("://")[2].rstrip("/").partition("/")[2]:
        return f'"{url}" ends before its path; did you mean "{url.rstrip("/")}/v1"?'
    return ""


@lru_cache(maxsize=256)
def shown_url(url: str) -> str:
    """A URL as messages may show it: without credentials and query."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return url.rpartition("@")[2].partition("?")[0]
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _is_host(text: str) -> bool:
    """A name, a number, or a number of six in brackets."""
    if not (text.startswith("[") and text.endswith("]")):
        return _HOST.fullmatch(text) is not None
    try:
        IPv6Address(text[1:-1])
    except ValueError:
        return False
    return True


def _is_port(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,5}", text) is not None and 1 <= int(text) <= _HIGHEST_PORT


def _wrong_port(text: str) -> str:
    return f'"{text}" is no port; ports go from 1 to {_HIGHEST_PORT}'
