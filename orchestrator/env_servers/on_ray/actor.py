"""What runs on a node of a Ray cluster: one env server under its keeper, and an actor that starts, reads and ends it.

It is sent to the node as code, and so is our `envs` package, so that nodes need neither of them installed and always
run the release that the service runs. It uses nothing beyond the standard library, and Ray. The server's lifeline is
held by the actor's process alone: however that ends (its job, its owner or its node goes), the keeper ends the server.
"""

import importlib
import io
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from orchestrator.env_servers.private_directory import PrivateDirectory

_KEPT_BYTES = 1024 * 1024
"""Output that waits to be fetched; of a server that says more in that time, the oldest is lost."""

_REST_S = 2.0
"""How long the last output may take to arrive once the server has ended."""


class ServerActor:
    """One server, from `start` to its end. Methods are called from several threads."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._directory: PrivateDirectory | None = None
        self._output: deque[bytes] = deque()
        self._code: int | None = None
        self._changed = threading.Condition()

    def start(
        self,
        library: bytes,
        instructions: bytes,
        python: str | None,
        path: Sequence[str],
        environ: Mapping[str, str],
    ) -> str:
        """Start the server, on this node's address and a free port; the node's address."""
        node: str = importlib.import_module("ray.util").get_node_ip_address()
        interpreter = python or sys.executable
        told = json.loads(instructions)
        told["bind"] = f"tcp://[{node}]:*" if ":" in node else f"tcp://{node}:*"
        self._directory = PrivateDirectory()
        home = self._directory.path
        with zipfile.ZipFile(io.BytesIO(library)) as archive:
            archive.extractall(home)
        keeper = str(home / "envs" / "keeper.py")
        places = [str(home), *path, os.environ.get("PYTHONPATH", "")]
        try:
            self._process = subprocess.Popen(
                [interpreter, "-I", "-S", keeper, interpreter, "-P", "-m", "envs.server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environ, "PYTHONPATH": os.pathsep.join(filter(None, places))},
                start_new_session=True,
            )
        except OSError as error:
            self._directory.remove()
            raise OSError(f"{interpreter} cannot be started on node {node}: {error.strerror}") from None
        assert self._process.stdin is not None
        reader = threading.Thread(target=self._read, daemon=True)
        reader.start()
        threading.Thread(target=self._wait, args=(reader,), daemon=True).start()
        try:
            self._process.stdin.write(json.dumps(told).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended already, which its exit tells
        return node

    def output(self) -> tuple[bytes, int | None]:
        """What it has said since the last call, once there is something; at its end its code too."""
        with self._changed:
            self._changed.wait_for(lambda: self._output or self._code is not None)
            said = b"".join(self._output)
            self._output.clear()
            return said, self._code

    def stop(self, grace_s: float) -> None:
        """Have it end by itself within the grace, or kill it."""
        if self._process is None:
            return
        self._process.terminate()
        with self._changed:
            if self._changed.wait_for(lambda: self._code is not None, grace_s):
                return
        assert self._process.stdin is not None
        self._process.stdin.close()  # its lifeline: the keeper kills it, and all that it started

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        while chunk := os.read(self._process.stdout.fileno(), 65536):
            with self._changed:
                self._output.append(chunk)
                while sum(map(len, self._output)) > _KEPT_BYTES:
                    self._output.popleft()
                self._changed.notify_all()

    def _wait(self, reader: threading.Thread) -> None:
        assert self._process is not None
        assert self._directory is not None
        code = self._process.wait()
        reader.join(_REST_S)
        self._directory.remove()
        with self._changed:
            self._code = code
            self._changed.notify_all()


def packed(package: Path) -> bytes:
    """A package's files as an archive, under the package's own name."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(package.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                archive.write(path, path.relative_to(package.parent))
    return packed.getvalue()
