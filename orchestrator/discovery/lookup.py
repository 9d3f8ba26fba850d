"""One look at a source, which may block: a name is resolved, or a file read, in a thread of its own.

The threads are daemons, because nothing can end a resolver that hangs, and the process must be able to end without it.
TTLs are not visible through `getaddrinfo`, so a name is looked at every few seconds.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable

from orchestrator.discovery.source import DnsSource, FileSource, Source, read_lines

_MOST_BYTES = 1 << 20

Look = Callable[[Source], list[str]]
"""The addresses that a source names now, none included; LookupFailed where nobody can tell. May block."""


class LookupFailed(Exception):  # noqa: N818  an outcome of a look, which its watch takes note of
    """What a source names cannot be told now."""


def look_up(source: Source) -> list[str]:
    """Ask the resolver, or read the file."""
    return _read(source) if isinstance(source, FileSource) else _resolve(source)


def _resolve(source: DnsSource) -> list[str]:
    try:
        found = socket.getaddrinfo(source.host, source.port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        # The resolver has answered, and there is nobody: a service without a ready server looks like this.
        if error.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)):
            return []
        raise LookupFailed(f"it cannot be resolved ({error.strerror})") from None
    except (OSError, UnicodeError) as error:
        raise LookupFailed(f"it cannot be resolved ({error})") from None
    numbers = dict.fromkeys((family, str(place[0])) for family, _, _, _, place in found)
    old = [number for family, number in numbers if family == socket.AF_INET]
    # A server with addresses of both kinds is one server.
    return source.addresses(sorted(old or [number for _, number in numbers]))


def _read(source: FileSource) -> list[str]:
    path = next((path for path in source.paths if path.exists()), source.paths[0])
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise LookupFailed(f"{path} is larger than {_MOST_BYTES} bytes")
        return read_lines(content.decode(), source.scheme)
    except OSError as error:
        raise LookupFailed(f"{path} cannot be read ({error.strerror or error})") from None
    except ValueError as error:
        raise LookupFailed(f"{path}: {error}") from None


Found = list[str] | LookupFailed


def look_aside(look: Look, source: Source) -> "asyncio.Future[Found]":
    """Begin a look in a thread; the future gets what it finds, or why it finds nothing."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Found] = loop.create_future()

    def tell(found: Found) -> None:
        if not done.done():
            done.set_result(found)

    def run() -> None:
        found: Found
        try:
            found = look(source)
        except LookupFailed as failure:
            found = failure
        except Exception as error:  # noqa: BLE001  whatever a resolver's own code raises is a look of no use
            found = LookupFailed(f"looking at it raised {type(error).__name__}: {error}")
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody wants to know any more
            loop.call_soon_threadsafe(tell, found)

    threading.Thread(target=run, name=f"look {source.text}", daemon=True).start()
    return done
