"""Virtualenvs with the libraries that the adapters are tested against; they conflict, so each has its own.

Run as a program it makes those that are missing, in the checkout, and is quick when all are there. A library
that cannot be installed leaves the reason behind, which its tests report as they are skipped.
"""

import subprocess
import sys
import venv
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
SERVER_NEEDS = ("aiohttp", "msgspec", "numpy", "pyzmq", "structlog", "uvloop")


@dataclass(frozen=True, slots=True)
class Venv:
    """A virtualenv and what is installed into it."""

    name: str
    requirements: tuple[str, ...]

    @property
    def path(self) -> Path:
        return CHECKOUT / f".venv-{self.name}"

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    @property
    def _stamp(self) -> Path:
        return self.path / "installed.txt"

    @property
    def _reason(self) -> Path:
        return self.path / "failed.txt"

    @property
    def wanted(self) -> str:
        return "\n".join((sys.version.split()[0], *self.requirements, *SERVER_NEEDS))

    def missing(self) -> str:
        """Why it cannot be used; empty when it can."""
        if (
            self._stamp.exists()
            and self._stamp.read_text(encoding="utf-8").splitlines()[1:] == (self.wanted.splitlines()[1:])
        ):
            return ""
        if self._reason.exists():
            return self._reason.read_text(encoding="utf-8")
        return f"{self.path.name} is not there; run tests/adapters/setup_venvs"

    def make(self) -> bool:
        """Make it unless it is there; whether it can be used."""
        if not self.missing():
            return True
        print(f"installing {' '.join(self.requirements)} into {self.path.name}", flush=True)
        venv.create(self.path, with_pip=True, clear=self.path.exists())
        command = [str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run(
            [*command, *self.requirements, *SERVER_NEEDS], capture_output=True, text=True, check=False
        )
        if done.returncode:
            last = (done.stderr.strip() or "pip failed").splitlines()[-1]
            self._reason.write_text(
                f"{' '.join(self.requirements)} cannot be installed: {last}", encoding="utf-8"
            )
            print(self.missing(), flush=True)
            return False
        self._stamp.write_text(self.wanted, encoding="utf-8")
        return True


REASONING_GYM = Venv("reasoning-gym", ("reasoning-gym>=0.1.24",))
CLASSIC = Venv("verifiers-classic", ("verifiers>=0.2,<0.4", "reasoning-gym>=0.1.24"))
V1 = Venv("verifiers-v1", ("verifiers>=0.4,<0.5", "uv>=0.6"))
DATASET = Venv("dataset", ("datasets>=3", "jsonschema>=4.20", "math-verify[antlr4-13-2]>=0.7", "pyarrow>=17"))
OPENENV = Venv("openenv", ("openenv-core>=0.3,<0.4",))
ATROPOS = Venv("atropos", ("atroposlib>=0.4,<0.5", "transformers<5"))
TEXTARENA = Venv("textarena", ("textarena>=0.7.4,<0.8",))
INSPECT = Venv("inspect", ("inspect-ai>=0.3.285,<0.4", "openai>=1.0"))
TRAINERS = Venv("trainers", ("torch==2.13.*", "atroposlib>=0.4,<0.5", "transformers<5"))
"""Not an environment's: torch, and the example trainer that comes with Atropos."""
TRACK = Venv("track", ("tensorboard>=2.18", "wandb>=0.19"))
TRL = Venv("trl", ("torch==2.13.*", "trl==1.16.0", "transformers==5.22.*", "accelerate==1.15.*", "requests"))
"""As examples/trl/requirements.txt has them: its trainer needs a later transformers than the one above."""
RAY = Venv(
    "ray",
    (
        "ray>=2.40,<3",
        "annotated-types>=0.7",
        "pydantic>=2.11",
        "pydantic-settings>=2.10",
        "rich>=13.9",
        "yarl>=1.17",
    ),
)
"""Not an environment's either: the service itself runs there, with what it needs."""
KUBERNETES = Venv("kubernetes", ("kubernetes-validate>=1.33", "pyyaml>=6"))
"""The schemas of Kubernetes' objects, and a reader of YAML."""
ALL = (
    REASONING_GYM,
    CLASSIC,
    V1,
    DATASET,
    OPENENV,
    ATROPOS,
    TEXTARENA,
    INSPECT,
    TRACK,
    TRAINERS,
    TRL,
    RAY,
    KUBERNETES,
)


def main() -> int:
    """Make all, a few side by side since they mostly download; the ones that fail are the tests' to report."""
    with ThreadPoolExecutor(max_workers=4) as makers:
        list(makers.map(Venv.make, ALL))
    return 0


if __name__ == "__main__":
    sys.exit(main())
