"""A program that puts limits on itself and then runs code that nobody trusts. Linux; the standard library alone.

Run as a file, in an empty folder that holds `job.json`; see `envs.dataset.unit_tests`, which starts it. Limits that
the kernel keeps, in the order in which they are put on: processor time, memory and file sizes (rlimits); no
capabilities, where the user is root; files (Landlock): the interpreter and the system's libraries can be read, the
folder can be written, everything else is out of reach; no sockets, no other processes, no signals to others
(seccomp). What cannot be put on is an error with `EXIT_UNCONFINED`, never a program that runs without.
"""

import contextlib
import ctypes
import json
import os
import platform
import resource
import runpy
import struct
import sys
from pathlib import Path
from typing import Any

EXIT_UNCONFINED = 97
"""Exit code when a limit cannot be put on; standard error says which."""

_READABLE = (
    "/usr",
    "/lib",
    "/lib64",
    "/bin",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/dev/urandom",
    "/dev/zero",
)

# Landlock's rights on files, by the version of its interface that added them (linux/landlock.h).
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
_RIGHTS_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1}
_RIGHTS_OF_A_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_PATH_BENEATH = 1

# prctl
_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER_MODE = 38, 22, 2
_CAPABILITY_VERSION_3 = 0x20080522

# Classic BPF: load a word of the call's data, jump on equal / greater or equal / any bit, return.
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_AT_NUMBER, _AT_ARCHITECTURE, _AT_FIRST_ARGUMENT = 0, 4, 16
_CLONE_THREAD = 0x00010000

# By machine: audit's name of the architecture, capset, clone, tgkill, and the calls that are refused, in this order:
# socket, kill, tkill, ptrace, process_vm_readv, process_vm_writev, io_uring_setup, pidfd_open, pidfd_send_signal,
# rt_sigqueueinfo, rt_tgsigqueueinfo, fork, vfork (the last two are x86's alone).
_MACHINES: dict[str, tuple[int, int, int, int, tuple[int, ...]]] = {
    "x86_64": (0xC000003E, 126, 56, 234, (41, 62, 200, 101, 310, 311, 425, 434, 424, 129, 297, 57, 58)),
    "aarch64": (0xC00000B7, 91, 220, 131, (198, 129, 130, 117, 270, 271, 425, 434, 424, 138, 240)),
}
_CLONE3 = 435


class UnconfinedError(RuntimeError):
    """A limit that this machine cannot put on."""


def confine(*, folder: str, cpu_s: int, memory_bytes: int, file_bytes: int) -> None:
    """Put all limits on this process, for good. Only its main thread may be running."""
    if sys.platform != "linux" or platform.machine() not in _MACHINES:
        raise UnconfinedError(f"files and network cannot be limited on {sys.platform} {platform.machine()}")
    limit_resources(cpu_s=cpu_s, memory_bytes=memory_bytes, file_bytes=file_bytes)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise UnconfinedError("prctl(PR_SET_NO_NEW_PRIVS) is refused")
    _limit_files(libc, folder)
    if os.geteuid() == 0:
        _drop_capabilities(libc)
    _limit_calls(libc)


def limit_resources(*, cpu_s: int, memory_bytes: int, file_bytes: int) -> None:
    """Limits that every Unix has: processor time, memory, size of a file, no core dump."""
    for what, limit in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_CORE, 0),
    ):
        with contextlib.suppress(ValueError, OSError):  # a lower limit is there already
            resource.setrlimit(what, (limit, limit))


def _limit_files(libc: Any, folder: str) -> None:
    version = libc.syscall(_CREATE_RULESET, None, 0, 1)
    if version < 1:
        raise UnconfinedError(
            "files cannot be limited: this kernel has no Landlock, or does not allow it here"
        )
    handled = _RIGHTS_BY_ABI[min(version, max(_RIGHTS_BY_ABI))]
    attributes = struct.pack("=Q", handled)
    ruleset = libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0)
    if ruleset < 0:
        raise UnconfinedError(f"files cannot be limited: {os.strerror(ctypes.get_errno())}")
    readable = {
        *_READABLE,
        sys.prefix,
        sys.base_prefix,
        str(Path(sys.executable).resolve().parent),
        *sys.path,
    }
    for path in sorted(filter(None, readable)):
        _allow(libc, ruleset, path, (_EXECUTE | _READ_FILE | _READ_DIR) & handled)
    _allow(libc, ruleset, "/dev/null", (_READ_FILE | _WRITE_FILE | _TRUNCATE) & handled)
    _allow(libc, ruleset, folder, handled)
    if libc.syscall(_RESTRICT_SELF, ruleset, 0):
        raise UnconfinedError(f"files cannot be limited: {os.strerror(ctypes.get_errno())}")
    os.close(ruleset)


def _allow(libc: Any, ruleset: int, path: str, rights: int) -> None:
    """Allow rights on a file or beneath a folder; one that does not exist needs none."""
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    if not Path(path).is_dir():
        rights &= _RIGHTS_OF_A_FILE
    rule = struct.pack("=Qi", rights, opened)
    failed = libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
    os.close(opened)
    if failed:
        raise UnconfinedError(f"files cannot be limited: {path}: {os.strerror(ctypes.get_errno())}")


def _drop_capabilities(libc: Any) -> None:
    _, capset, *_ = _MACHINES[platform.machine()]
    if libc.syscall(capset, struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), bytes(24)):
        raise UnconfinedError(f"root's capabilities cannot be dropped: {os.strerror(ctypes.get_errno())}")


def _limit_calls(libc: Any) -> None:
    architecture, _, clone, tgkill, refused = _MACHINES[platform.machine()]
    refuse = (_RETURN, 0, 0, _ERRNO | _EPERM)
    program = [
        (_LOAD, 0, 0, _AT_ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        refuse,
        (_LOAD, 0, 0, _AT_NUMBER),
        (_AT_LEAST, 0, 1, 0x40000000),  # x86's x32 calls, which have numbers of their own
        refuse,
    ]
    for number in refused:
        program += [(_EQUAL, 0, 1, number), refuse]
    # The C library then starts threads by clone, whose flags can be looked at.
    program += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    allow = (_RETURN, 0, 0, _ALLOW)
    first = (_LOAD, 0, 0, _AT_FIRST_ARGUMENT)
    program += [(_EQUAL, 0, 4, clone), first, (_ANY_BIT, 0, 1, _CLONE_THREAD), allow, refuse]
    program += [(_EQUAL, 0, 3, tgkill), first, (_EQUAL, 1, 0, os.getpid()), refuse, allow]
    code = b"".join(struct.pack("=HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(code)
    filter_program = struct.pack("@HP", len(program), ctypes.addressof(buffer))
    if libc.prctl(_SET_SECCOMP, _FILTER_MODE, filter_program, 0, 0):
        raise UnconfinedError(f"network cannot be limited: {os.strerror(ctypes.get_errno())}")


def main() -> int:
    """Read the job, take it away, put the limits on, run the code and say on standard output which tests passed."""
    folder = Path.cwd()
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    (folder / "job.json").unlink()
    limits = job["limits"]
    try:
        if job["confined"]:
            confine(folder=str(folder), **limits)
        else:
            limit_resources(**limits)
    except UnconfinedError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_UNCONFINED
    sys.path.insert(0, str(folder))
    if job["tests"] is None:
        sys.argv = ["solution.py"]
        runpy.run_path(str(folder / "solution.py"), run_name="__main__")
        return 0
    _run_tests(job["tests"], mark=job["mark"])
    return 0


def _run_tests(tests: list[str], *, mark: str) -> None:
    """Run the tests one after the other on what the solution defined; each that passes is written as `mark` and its number.

    An exit code or a printed word would say nothing, as the solution can end the process and print as well.
    """
    said = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    # A module, so that what the solution pickles, or looks up by name, is found.
    namespace: dict[str, Any] = vars(sys.modules["__main__"]) | {"__name__": "solution"}
    try:
        exec(compile(Path("solution.py").read_text(encoding="utf-8"), "solution.py", "exec"), namespace)  # noqa: S102  what this program is for
    except BaseException:  # noqa: BLE001  it fails in any way it likes; then no test passes
        return
    for number, test in enumerate(tests):
        with contextlib.suppress(BaseException):  # whatever it raises, the test has failed
            exec(compile(test, f"test {number}", "exec"), dict(namespace))  # noqa: S102  as above
            os.write(said, f"{mark} {number}\n".encode())


if __name__ == "__main__":
    code = main()
    # Threads that the solution left behind must not keep the process.
    sys.stdout.flush()
    os._exit(code)
