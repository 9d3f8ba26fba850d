"""Hosts of a network that the test makes and breaks: namespaces, joined by a switch in a thread of the test.

Every host is a network namespace with one TUN device, whose packets come to the switch and leave it again by their
address. So the switch decides what happens to each: a pair of hosts can be cut off from each other, in one direction or
both, without a reset and without anybody being told; packets can be lost at random, come late, or overtake each other. Nothing
of it touches the namespace of the test, needs a firewall, or has a name: a namespace is held by a process that ends with
the test, however that ends, and is gone with it. Root is needed, see `missing`.
"""

import contextlib
import ctypes
import errno
import fcntl
import heapq
import itertools
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_SUBNET = "10.213.0"
_MTU = 9000
_ESTABLISHED = "01"


def missing() -> str:
    """Why there can be no such network here; empty where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    tools = [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]
    if tools:
        return f"there is no {', '.join(tools)}"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "there is no /dev/net/tun"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else f"no namespace can be made: {tried.stderr.decode().strip()}"


@dataclass(frozen=True, slots=True)
class Host:
    """One namespace; `pid` is the process that holds it."""

    name: str
    address: str
    pid: int

    @property
    def prefix(self) -> list[str]:
        """What to put in front of a command so that it runs here, as the same process."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", "--"]

    def connected_to(self, other: "Host") -> int:
        """How many of this host's TCP connections to another one it takes for established."""
        little = bytes(map(int, reversed(other.address.split(".")))).hex().upper()
        rows = Path(f"/proc/{self.pid}/net/tcp").read_text(encoding="ascii").splitlines()[1:]
        fields = [row.split() for row in rows]
        return sum(row[3] == _ESTABLISHED and row[2].startswith(f"{little}:") for row in fields)

    def get(self, url: str, *, timeout_s: float = 5.0) -> bytes:
        """The body of an HTTP answer, asked for from here."""
        answer: list[bytes] = []
        failure: list[OSError] = []

        def ask() -> None:
            # A thread has a namespace of its own, and this one ends with it.
            with Path(f"/proc/{self.pid}/ns/net").open("rb") as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                    failure.append(OSError(ctypes.get_errno(), f"cannot enter the namespace of {self.name}"))
                    return
            try:
                with urllib.request.urlopen(url, timeout=timeout_s) as response:
                    answer.append(response.read())
            except OSError as error:
                failure.append(error)

        thread = threading.Thread(target=ask, name=f"asks from {self.name}")
        thread.start()
        thread.join()
        if failure:
            raise failure[0]
        return answer[0]


class Network:
    """The hosts and the switch between them, as a context manager."""

    def __init__(self, *names: str, seed: int = 0) -> None:
        self._names = names
        self._rng = random.Random(seed)
        self._stack = contextlib.ExitStack()
        self._devices: dict[bytes, int] = {}
        self._cut: frozenset[tuple[bytes, bytes]] = frozenset()
        self._loss = 0.0
        self._delay_s = (0.0, 0.0)
        self._order = itertools.count()
        self._late: list[tuple[float, int, int, bytes]] = []
        self.hosts: dict[str, Host] = {}
        self.passed = self.dropped = self.overtaken = 0

    def __enter__(self) -> Self:
        with self._stack:
            for number, name in enumerate(self._names, start=1):
                self._add(number, name)
            self._wake, waker = os.pipe()
            self._stack.callback(os.close, self._wake)
            switch = threading.Thread(target=self._run, name="switch")
            switch.start()
            self._stack.callback(switch.join)
            self._stack.callback(os.close, waker)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._stack.close()

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    @contextlib.contextmanager
    def cut(self, one: str, other: str, *, one_way: bool = False) -> Iterator[None]:
        """Swallow every packet between two hosts, or from one to the other, as long as the block lasts."""
        there, back = self._key(one), self._key(other)
        before = self._cut
        self._cut = before | ({(there, back)} if one_way else {(there, back), (back, there)})
        try:
            yield
        finally:
            self._cut = before

    @contextlib.contextmanager
    def losing(self, share: float) -> Iterator[None]:
        """Lose this share of all packets, at random."""
        self._loss = share
        try:
            yield
        finally:
            self._loss = 0.0

    @contextlib.contextmanager
    def delaying(self, least_s: float, most_s: float) -> Iterator[None]:
        """Hold every packet for a random time, so that many overtake others."""
        self._delay_s = (least_s, most_s)
        try:
            yield
        finally:
            self._delay_s = (0.0, 0.0)

    def _key(self, name: str) -> bytes:
        return bytes(map(int, self.hosts[name].address.split(".")))

    def _add(self, number: int, name: str) -> None:
        # Ends when the pipe closes, which it does with this process, whatever ends it.
        holder = subprocess.Popen(
            ["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert holder.stdin is not None
        assert holder.stdout is not None
        self._stack.callback(holder.wait)
        self._stack.callback(holder.stdout.close)
        self._stack.callback(holder.stdin.close)
        # It answers once it is in its namespace.
        holder.stdin.write(b"there\n")
        holder.stdin.flush()
        holder.stdout.readline()
        host = Host(name, f"{_SUBNET}.{number}", holder.pid)
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._stack.callback(os.close, descriptor)
        device = f"t{number}x{os.getpid()}"[:15]
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TUN | _IFF_NO_PI))
        _execute("ip", "link", "set", device, "netns", str(holder.pid))
        _execute(*host.prefix, "ip", "link", "set", "lo", "up")
        _execute(*host.prefix, "ip", "address", "add", f"{host.address}/24", "dev", device)
        _execute(*host.prefix, "ip", "link", "set", device, "up", "mtu", str(_MTU))
        self.hosts[name] = host
        self._devices[self._key(name)] = descriptor

    def _run(self) -> None:
        """The switch: until the pipe closes."""
        poll = select.epoll()
        with contextlib.closing(poll):
            poll.register(self._wake, select.EPOLLIN | select.EPOLLHUP)
            for descriptor in self._devices.values():
                poll.register(descriptor, select.EPOLLIN)
            while True:
                pause = max(0.0, self._late[0][0] - time.monotonic()) if self._late else None
                for descriptor, _ in poll.poll(pause):
                    if descriptor == self._wake:
                        return
                    self._take(descriptor)
                while self._late and self._late[0][0] <= time.monotonic():
                    _, _, descriptor, packet = heapq.heappop(self._late)
                    self._deliver(descriptor, packet)

    def _take(self, descriptor: int) -> None:
        """Decide what becomes of the packets that a host sends."""
        for _ in range(64):
            try:
                packet = os.read(descriptor, _MTU + 64)
            except BlockingIOError:
                return
            source, target = packet[12:16], packet[16:20]
            to = self._devices.get(target)
            if packet[0] >> 4 != 4 or to is None:
                continue
            if (source, target) in self._cut or (self._loss and self._rng.random() < self._loss):
                self.dropped += 1
                continue
            if self._delay_s[1]:
                due = time.monotonic() + self._rng.uniform(*self._delay_s)
                self.overtaken += bool(self._late) and due < max(entry[0] for entry in self._late[:8])
                heapq.heappush(self._late, (due, next(self._order), to, packet))
            else:
                self._deliver(to, packet)

    def _deliver(self, descriptor: int, packet: bytes) -> None:
        try:
            os.write(descriptor, packet)
            self.passed += 1
        except OSError as error:
            # Its queue is full, or it is being taken down: that is a lost packet too.
            if error.errno not in (errno.EAGAIN, errno.EIO, errno.ENOBUFS):
                raise
            self.dropped += 1


def _execute(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
