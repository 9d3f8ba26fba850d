"""What a source is called in a configuration, and which addresses its answers stand for. Pure.

`dns+tcp://NAME:PORT` and `dns+http://NAME:PORT/v1` stand for every address behind the name, each with the port and the
path. `file:PATH` stands for the addresses in a file, one in a line; what follows a `#` is a comment. There is no
dns+https: members are reached by number, and a certificate is made out to a name.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from envs.addresses import base_url_problem, server_address_problem

SERVERS, ENGINES = "tcp", "http"
"""What a source of env servers, and what one of inference servers, is made of."""

_FILE = "file:"


@dataclass(frozen=True, slots=True)
class DnsSource:
    """Every address behind a name."""

    text: str
    scheme: str
    host: str
    port: int
    path: str

    def addresses(self, numbers: Iterable[str]) -> list[str]:
        """The servers at these IP addresses."""
        return [
            f"{self.scheme}://{f'[{number}]' if ':' in number else number}:{self.port}{self.path}"
            for number in numbers
        ]


@dataclass(frozen=True, slots=True)
class FileSource:
    """The addresses in a file: the first of the paths that is there."""

    text: str
    scheme: str
    paths: tuple[Path, ...]


Source = DnsSource | FileSource


def is_source(text: str) -> bool:
    """Whether an entry names a source, not a server."""
    return text.startswith(("dns+", _FILE))


def source_problem(text: str, scheme: str) -> str:
    """What is wrong with a source of servers that are reached by `scheme`; empty if nothing is."""
    if text.startswith(_FILE):
        return "" if _file_name(text) else f'"{text}" names no file'
    example = "dns+tcp://envs.rl.svc:7000" if scheme == SERVERS else "dns+http://vllm.rl.svc:8000/v1"
    kind = text.partition("://")[0]
    if kind == "dns+https":
        return (
            f'"{text}": there is no dns+https, because its servers are reached by number and a certificate is made '
            "out to a name; list https:// addresses, or name a file with them (file:engines.txt)"
        )
    if kind != f"dns+{scheme}":
        return f'"{text}" does not begin with dns+{scheme}:// or file:; write for example "{example}"'
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or "@" in parts.netloc or parts.query or parts.fragment:
        return f'"{text}" is not a name and a port; write for example "{example}"'
    if scheme == ENGINES:
        return base_url_problem(text.removeprefix("dns+")).replace('"http://', '"dns+http://')
    return f'"{text}" has a path, and env servers have none' if parts.path.strip("/") else ""


def parse_source(text: str, scheme: str, directories: Iterable[Path] = ()) -> Source:
    """The source that an entry without a problem names; a file is looked for in these directories, one after the other."""
    if text.startswith(_FILE):
        path = Path(_file_name(text)).expanduser()
        return FileSource(text, scheme, tuple(directory / path for directory in directories) or (path,))
    parts = urlsplit(text)
    assert parts.hostname is not None
    assert parts.port is not None
    return DnsSource(text, scheme, parts.hostname, parts.port, parts.path.rstrip("/"))


def read_lines(text: str, scheme: str) -> list[str]:
    """The addresses in the text of a file; ValueError that names the first line which is none."""
    found: dict[str, None] = {}
    for number, line in enumerate(text.splitlines(), 1):
        entry = re.split(r"(?:^|\s)#", line, maxsplit=1)[0].strip().rstrip("/")
        problem = _address_problem(entry, scheme) if entry else ""
        if problem:
            raise ValueError(f"line {number}: {problem}")
        if entry:
            found[entry] = None
    return list(found)


def _address_problem(entry: str, scheme: str) -> str:
    return base_url_problem(entry) if scheme == ENGINES else server_address_problem(entry)


def _file_name(text: str) -> str:
    """The path in file:PATH; file:///PATH is the same as file:/PATH."""
    name = text.removeprefix(_FILE)
    return name.removeprefix("//") if name.startswith("///") else name
