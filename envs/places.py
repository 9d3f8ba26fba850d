"""Where in an environment's own code an exception was raised, which is what its author wants to know first.

A traceback passes through our code, the author's, and that of libraries. The author's is what is neither ours, nor of the
interpreter, nor installed; a file of the environment's own package is the author's wherever it lies. Must not raise:
it looks at exceptions of foreign code.
"""

import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from types import CodeType

_OURS = os.path.realpath(Path(__file__).parent)
_INTERPRETER = tuple(os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
_INSTALLED = ("site-packages", "dist-packages")


def package_of(made: object) -> str:
    """The directory of an object's package, or its file where it has none; empty when nobody knows."""
    module = sys.modules.get(type(made).__module__)
    file = getattr(module, "__file__", None)
    if file is None:
        return ""
    top = sys.modules.get(type(made).__module__.partition(".")[0])
    top_file = getattr(top, "__file__", None)
    in_package = getattr(top, "__path__", None) is not None and top_file is not None
    if in_package and not _within(os.path.realpath(str(top_file)), _OURS):
        file = Path(str(top_file)).parent
    return os.path.realpath(file)


def find_place(error: BaseException, package: str = "") -> str:
    """The last line of the author's own code that an exception passed: "spelling.py:14 in rollout"; else empty."""
    if isinstance(error, SyntaxError) and error.filename and not _is_known(error.filename):
        return f"{_shown(error.filename)}:{error.lineno}"
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if _is_authors(code.co_filename, package):
            place = f"{_shown(code.co_filename)}:{line} in {code.co_name}"
    return place


def place_of(function: object) -> str:
    """Where a function or method begins; empty for other things that can be called."""
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return f"{_shown(code.co_filename)}:{code.co_firstlineno}" if isinstance(code, CodeType) else ""


def readable_traceback(error: BaseException, package: str = "") -> str:
    """A traceback without our own frames and those of imports; all of them where nothing else is left."""
    shown: traceback.TracebackException | None = traceback.TracebackException.from_exception(error)
    text = shown
    seen = set()
    while shown is not None and id(shown) not in seen:
        seen.add(id(shown))
        kept = [frame for frame in shown.stack if not _is_noise(frame.filename, package)]
        if kept:
            shown.stack = traceback.StackSummary.from_list(kept)
        shown = shown.__cause__ or shown.__context__
    assert text is not None
    return "".join(text.format())


def describe(error: BaseException, package: str = "") -> str:
    """Type, text and place of an exception in one line."""
    place = find_place(error, package)
    return f"{type(error).__name__}: {text_of(error)}".removesuffix(": ") + (f", at {place}" if place else "")


def text_of(value: object) -> str:
    """A text that can be sent, of anything: lone surrogates are replaced, and str() may raise."""
    try:
        return str(value).encode("utf-8", "replace").decode()
    # A failure must reach the client whatever the environment's exception does when it is shown.
    except BaseException:  # noqa: BLE001  see above
        return f"a {type(value).__name__} that cannot be shown"


@lru_cache(maxsize=4096)
def _is_authors(file: str, package: str) -> bool:
    path = _real(file)
    return (bool(package) and _within(path, package)) or not _is_known(file)


@lru_cache(maxsize=4096)
def _is_noise(file: str, package: str) -> bool:
    path = _real(file)
    if package and _within(path, package):
        return False
    return file.startswith("<frozen ") or _within(path, _OURS) or file.endswith("/importlib/__init__.py")


def _is_known(file: str) -> bool:
    """Whether a file is ours, the interpreter's or installed, or no file at all."""
    path = _real(file)
    inside: Sequence[str] = Path(path).parts
    return (
        (file.startswith("<") and not file.startswith("<ipython"))  # a cell of a notebook is its author's
        or any(name in inside for name in _INSTALLED)
        or any(_within(path, root) for root in (_OURS, *_INTERPRETER))
    )


def _real(file: str) -> str:
    """A path without links; as it is where it is relative to a working directory that is no longer there."""
    try:
        return os.path.realpath(file)
    except OSError:
        return file


def _within(path: str, root: str) -> bool:
    return path == root or path.startswith(root + os.sep)


def _shown(file: str) -> str:
    """Relative to the working directory where it lies below it."""
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return file
