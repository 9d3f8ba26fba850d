"""The examples stay what they say they are, as far as that shows without torch: short, in step with the client, told in full.

That the trainer learns is shown on real engines (`make example`), and its loss with torch (`tests/adapters`).
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator import trainer as trainer_room
from orchestrator.trainer import TrainerClient, TrainingBatch, TrainingSequence

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "grpo_torch"
README = (EXAMPLE / "README.md").read_text(encoding="utf-8")
SOURCE = (EXAMPLE / "train.py").read_text(encoding="utf-8")
TREE = ast.parse(SOURCE)
COMMAND = Path(sys.executable).parent / "orchestrator"


def options() -> set[str]:
    """The options that the trainer's parser is given."""
    calls = [node for node in ast.walk(TREE) if isinstance(node, ast.Call)]
    return {
        call.args[0].value
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr == "add_argument"
        and isinstance(call.args[0], ast.Constant)
        and isinstance(call.args[0].value, str)
    }


def attributes(name: str) -> set[str]:
    """What the trainer asks of the variable of a name."""
    return {
        node.attr
        for node in ast.walk(TREE)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name
    }


def test_the_trainer_can_be_read_at_one_sitting() -> None:
    """At most 250 lines, counted whole."""
    assert len(SOURCE.splitlines()) <= 250


def test_the_trainer_asks_for_what_the_client_has() -> None:
    """Names that it imports, and what it asks of the client, of a batch and of a sequence, are there."""
    imported = {
        name.name
        for node in ast.walk(TREE)
        if isinstance(node, ast.ImportFrom) and node.module == "orchestrator.trainer"
        for name in node.names
    }
    assert {"TrainerClient", "micro_batches", "pad"} <= imported
    assert imported <= set(trainer_room.__all__)
    asked = attributes("trainer")
    assert {"publish", "ack", "checkpointed", "report", "finished"} <= asked
    with_defaults = set(dir(TrainerClient("tcp://127.0.0.1:1")))
    assert asked <= with_defaults
    assert attributes("batch") <= set(dir(TrainingBatch)) | {"rewards"}
    assert attributes("one") <= set(TrainingSequence.__slots__)
    names = set(re.findall(r'rows\["(\w+)"\]', SOURCE))
    assert names
    assert names <= set(trainer_room.Padded.__dataclass_fields__)


def test_the_options_of_the_trainer_are_those_of_its_page() -> None:
    """Each has a row in the table, and every command that starts the trainer uses no other."""
    assert set(re.findall(r"^\| `(--[\w-]+)`", README, re.MULTILINE)) == options()
    started = re.findall(
        r"torchrun .*?train\.py (.*)", README + (ROOT / "docs" / "trainer.md").read_text(encoding="utf-8")
    )
    assert len(started) >= 2
    for command in started:
        assert set(re.findall(r"--[\w-]+", command)) <= options()


def test_the_links_of_its_page_lead_somewhere() -> None:
    """Every relative link names a file of the checkout."""
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (EXAMPLE / link).exists()] == []


@pytest.mark.parametrize("page", ["README.md", "docs/trainer.md", "CONTRIBUTING.md"])
def test_the_pages_point_to_it(page: str) -> None:
    """Whoever looks for a trainer finds it."""
    assert "examples/grpo_torch" in (ROOT / page).read_text(encoding="utf-8")


def run(*arguments: str, where: Path) -> str:
    done = subprocess.run([COMMAND, *arguments], cwd=where, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_its_configuration_can_be_run() -> None:
    """`check` has nothing to say against it, from the root of the checkout, where its page stands."""
    told = run("check", "examples/grpo_torch/config.toml", where=ROOT)
    assert "2 rank(s)" in told
    assert '"keep_batches": "checkpoint"' in told


def test_its_environment_runs() -> None:
    """With the policy that comes along; what is rewarded is the letter that was shown."""
    told = run("env", "try", "letters:Letters", "-n", "2", where=EXAMPLE)
    assert "reward" in told
