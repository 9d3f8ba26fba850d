"""Addresses: which stay on this machine and need neither keys nor a token, which can be used, and how they are shown."""

from functools import lru_cache
from ipaddress import ip_address
from urllib.parse import urlsplit, urlunsplit


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


def base_url_problem(url: str) -> str:
    """What is wrong with the base URL of an inference server; empty if nothing is."""
    if not url.startswith(("http://", "https://")):
        return f'"{url}" is not an http:// or https:// address'
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
