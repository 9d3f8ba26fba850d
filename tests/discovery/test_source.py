"""How sources are written, and what their answers stand for."""

import re
from pathlib import Path

import pytest

from orchestrator.discovery import DnsSource, FileSource, is_source, parse_source, source_problem
from orchestrator.discovery.source import ENGINES, SERVERS, read_lines


@pytest.mark.parametrize(
    ("text", "scheme", "problem"),
    [
        ("dns+tcp://envs-math.rl.svc:7000", SERVERS, ""),
        ("dns+http://vllm.rl.svc:8000/v1", ENGINES, ""),
        ("file:engines.txt", ENGINES, ""),
        ("file:///etc/engines.txt", SERVERS, ""),
        ("file:", SERVERS, "names no file"),
        ("dns+tcp://envs:7000", ENGINES, "does not begin with dns.http:// or file:"),
        ("dns+http://vllm:8000/v1", SERVERS, "does not begin with dns.tcp:// or file:"),
        ("dns+udp://envs:7000", SERVERS, "does not begin with"),
        ("dns+https://vllm:8000/v1", ENGINES, "a certificate is made out to a name"),
        ("dns+tcp://envs", SERVERS, "is not a name and a port"),
        ("dns+tcp://:7000", SERVERS, "is not a name and a port"),
        ("dns+tcp://envs:70000", SERVERS, "is not a name and a port"),
        ("dns+tcp://[:7000", SERVERS, "is not a name and a port"),
        ("dns+http://user:word@vllm:8000/v1", ENGINES, "is not a name and a port"),
        ("dns+tcp://envs:7000/v1", SERVERS, "has a path"),
        ("dns+http://vllm:8000", ENGINES, r'did you mean "dns.http://vllm:8000/v1"'),
    ],
)
def test_a_source_that_cannot_be_meant_is_told_with_the_remedy(text: str, scheme: str, problem: str) -> None:
    """Each mistake has its own sentence; what is right has none."""
    assert is_source(text)
    found = source_problem(text, scheme)
    assert (found == "") == (problem == "")
    assert re.search(problem, found), found


def test_a_server_is_not_a_source() -> None:
    """Listed addresses are as they were."""
    assert not any(map(is_source, ["tcp://10.0.0.7:7000", "ipc:///tmp/x", "http://a/v1", "dns.example:7000"]))


def test_addresses_behind_a_name_have_its_port_and_path() -> None:
    """Numbers of six have brackets around them."""
    servers = parse_source("dns+tcp://envs.rl.svc:7000", SERVERS)
    assert isinstance(servers, DnsSource)
    assert servers.addresses(["10.0.0.7", "fd00::7"]) == ["tcp://10.0.0.7:7000", "tcp://[fd00::7]:7000"]
    engines = parse_source("dns+http://vllm.rl.svc:8000/v1/", ENGINES)
    assert isinstance(engines, DnsSource)
    assert engines.addresses(["10.0.0.7"]) == ["http://10.0.0.7:8000/v1"]


def test_a_file_is_looked_for_where_modules_are(tmp_path: Path) -> None:
    """In the working directory, then beside the configuration; an absolute path is what it says."""
    source = parse_source("file:engines.txt", ENGINES, [Path("/a"), Path("/b")])
    assert isinstance(source, FileSource)
    assert source.paths == (Path("/a/engines.txt"), Path("/b/engines.txt"))
    for text in (f"file:{tmp_path}/x", f"file://{tmp_path}/x"):
        absolute = parse_source(text, ENGINES, [Path("/a")])
        assert isinstance(absolute, FileSource)
        assert absolute.paths == (tmp_path / "x",)


def test_lines_of_a_file_are_addresses_without_comments() -> None:
    """Blank lines and comments count for nothing, an address that is there twice counts once."""
    text = "# all\n\n tcp://10.0.0.7:7000  # first\ntcp://10.0.0.7:7000\nipc:///tmp/a#b\n"
    assert read_lines(text, SERVERS) == ["tcp://10.0.0.7:7000", "ipc:///tmp/a#b"]
    assert read_lines("http://a:1/v1/\n", ENGINES) == ["http://a:1/v1"]


@pytest.mark.parametrize(
    ("line", "scheme"),
    [
        ("10.0.0.7:7000", SERVERS),
        ("tcp://10.0.0.7", SERVERS),
        ("dns+tcp://a:7", SERVERS),
        ("tcp://*:7000", SERVERS),
        ("tcp://foo/bar:70", SERVERS),
        ("tcp://10.0.0.7:99999", SERVERS),
        ("tcp://10.0.0.7:0", SERVERS),
        ("tcp://::1:7000", SERVERS),
        ("tcp://[zz]:7000", SERVERS),
        ("tcp://eth0;10.0.0.7:7000", SERVERS),
        ("tcp://häuser:7000", SERVERS),
        ("ipc://", SERVERS),
        ("ipc://*", SERVERS),
        ("ipc:///" + "a" * 107, SERVERS),
        ("inproc://x", SERVERS),
        ("http://a:1", ENGINES),
        ("http://a:99999/v1", ENGINES),
        ("http://a:0/v1", ENGINES),
        ("http://a:/v1", ENGINES),
        ("http://[zz]:1/v1", ENGINES),
        ("http://*:1/v1", ENGINES),
        ("http://:1/v1", ENGINES),
        ("http://a b/v1", ENGINES),
    ],
)
def test_a_line_that_is_no_address_is_named(line: str, scheme: str) -> None:
    """Half of a line that is being written is no address either."""
    with pytest.raises(ValueError, match="line 2: "):
        read_lines(f"# first\n{line}\n", scheme)


@pytest.mark.parametrize(
    ("line", "scheme"),
    [
        ("tcp://envs_math-0.rl.svc:7000", SERVERS),
        ("tcp://[fe80::7%eth0]:65535", SERVERS),
        ("ipc://" + "a" * 107, SERVERS),
        ("ipc://@abstract", SERVERS),
        ("http://[fd00::7]/v1", ENGINES),
        ("https://user:word@engine.example:8000/v1", ENGINES),
        ("https://häuser.example/v1", ENGINES),
    ],
)
def test_a_line_that_can_be_reached_is_an_address(line: str, scheme: str) -> None:
    """Names, numbers of both kinds, paths as long as the kernel takes them."""
    assert read_lines(line, scheme) == [line]


def test_what_is_said_of_a_line_shows_no_password() -> None:
    """It goes into the log."""
    with pytest.raises(ValueError, match='line 1: "http://a:99999/v1": "99999" is no port') as error:
        read_lines("http://user:sesame@a:99999/v1", ENGINES)
    assert "sesame" not in str(error.value)
