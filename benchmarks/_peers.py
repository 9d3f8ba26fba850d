"""Libraries that are measured beside us, each in its virtualenv and driven there by a script of ours.

They are installed from the registry by name, and only when BENCH_PEERS=1 asks for it, into the virtualenvs that the tests of
adapters have too. A script reads one request as JSON from its standard input and answers on its standard output.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.adapters.venvs import Venv

HERE = Path(__file__).parent
LIMIT_S = 900.0


def asked() -> bool:
    """Whether peers are to be measured."""
    return os.environ.get("BENCH_PEERS") == "1"


def why_absent(venv: Venv) -> str:
    """Install the peer if that was asked for; why it cannot be measured, or nothing."""
    if not asked():
        return "peers that need a library were not measured: BENCH_PEERS=1 installs and measures them"
    return "" if venv.make() else venv.missing()


def ask(venv: Venv, script: str, request: dict[str, Any]) -> tuple[dict[str, float] | None, str]:
    """What a script of this package answers inside of the virtualenv, or why there is no answer."""
    if absent := why_absent(venv):
        return None, absent
    # Only one directory of ours is on the path: our modules must not hide the library.
    environ = {**os.environ, "PYTHONPATH": str(HERE / "environments"), "HF_HUB_OFFLINE": "1"}
    command = [str(venv.python), "-P", str(HERE / script)]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(request),
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
            timeout=LIMIT_S,
            check=True,
        )
        answer: dict[str, float] = json.loads(done.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        # Our own figures are not lost by it.
        return None, f"a peer was not measured, {script} failed: {error}"
    return answer, ""
