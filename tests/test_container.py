"""The image and its neighbours, read rather than built: what must hold of them whatever builds them."""

import json
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile as (instruction, rest), with continued lines joined and comments left out."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    joined = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    lines = [line for line in joined.splitlines() if line.strip()]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


DOCKERFILE = instructions()
SECOND = max(number for number, (word, _) in enumerate(DOCKERFILE) if word == "FROM")
CONFIG = tomllib.loads((ROOT / "configs" / "container.toml").read_text(encoding="utf-8"))
COMPOSE = (ROOT / "compose.yaml").read_text(encoding="utf-8")


def last(instruction: str) -> str:
    """What holds in the image: the last such instruction of the second stage."""
    return [rest for word, rest in DOCKERFILE[SECOND:] if word == instruction][-1]


def test_the_image_has_two_stages() -> None:
    """What builds it does not stay in it: the second stage takes over the virtualenv alone."""
    assert [rest.split()[0] for word, rest in DOCKERFILE if word == "FROM"] == ["${PYTHON_IMAGE}"] * 2
    assert ("ARG", "PYTHON_IMAGE=python:3.12-slim") in DOCKERFILE[:1]
    assert any(rest.startswith("--from=build /opt/venv") for word, rest in DOCKERFILE if word == "COPY")


@pytest.mark.parametrize(
    ("image", "pinned"),
    [
        (f"python:3.12-slim@sha256:{'0a' * 32}", True),
        ("python:3.12-slim", False),
        ("python:3.12-slim@sha256:DIGEST", False),
        (f"@sha256:{'0a' * 32}", False),
        ("", False),
    ],
)
def test_a_release_names_the_digest_that_its_image_is_built_from(image: str, pinned: bool) -> None:
    """It is printed, or the one line says how to find it."""
    done = subprocess.run(
        [ROOT / ".ci" / "pinned-image"],
        env={"PATH": os.environ["PATH"], "PYTHON_IMAGE": image},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) is pinned
    if pinned:
        assert done.stdout == f"the image is built from {image}\n"
    else:
        assert f'PYTHON_IMAGE is "{image}"; set it to the image\'s base with its digest' in done.stderr
    assert ".ci/pinned-image" in (ROOT / ".ci" / "release-check").read_text(encoding="utf-8")


def test_the_image_does_not_run_as_root() -> None:
    """The user is a number, so that a supervisor can see that it is not root."""
    assert int(last("USER")) > 0


def test_an_init_is_process_1_and_the_command_is_the_default() -> None:
    """Exec form, so that signals reach the orchestrator, which runs /config.toml unless told otherwise."""
    assert json.loads(last("ENTRYPOINT")) == ["/usr/bin/tini", "--", "orchestrator"]
    assert json.loads(last("CMD")) == ["run", "/config.toml"]
    assert any("install" in rest and "tini" in rest for word, rest in DOCKERFILE[SECOND:] if word == "RUN")


def test_the_health_check_asks_where_the_service_answers() -> None:
    """From inside the container, on loopback, at the port of its configuration."""
    _, _, command = last("HEALTHCHECK").partition("CMD ")
    port = CONFIG["http"]["port"]
    assert f"http://127.0.0.1:{port}/healthz" in json.loads(command)[-1]
    assert "host" not in CONFIG["http"]


def test_the_trainer_waits_until_there_is_a_run() -> None:
    """The image says that the process is alive; the compose file waits for /readyz, at the configured port."""
    assert f"http://127.0.0.1:{CONFIG['http']['port']}/readyz" in COMPOSE
    assert "condition: service_healthy" in COMPOSE


def test_everything_that_is_copied_reaches_the_builder() -> None:
    """.dockerignore lets through exactly what the Dockerfile copies from the checkout."""
    copied = {
        source.removeprefix("./").split("/")[0]
        for word, rest in DOCKERFILE
        if word == "COPY" and "--from" not in rest
        for source in rest.split()[:-1]
    }
    ignore = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert {line[1:] for line in ignore if line.startswith("!")} == copied
    assert "*" in ignore
    assert all((ROOT / name).exists() for name in copied)


def test_versions_in_the_image_are_the_locked_ones() -> None:
    """The same constraints as in a checkout, and no development tools."""
    (install,) = [rest for word, rest in DOCKERFILE[:SECOND] if word == "RUN" and "pip install" in rest]
    assert "--constraint constraints.txt" in install
    assert "dev" not in install


@pytest.mark.parametrize("service", ["inference", "orchestrator", "trainer"])
def test_the_neighbours_are_in_the_compose_file(service: str) -> None:
    """The orchestrator beside an inference server and a trainer."""
    assert re.search(rf"^  {service}:$", COMPOSE, re.MULTILINE)


def test_the_neighbours_find_each_other() -> None:
    """Names, ports and the model are the same in the configuration and in the compose file."""
    assert CONFIG["inference"]["base_urls"] == ["http://inference:8000/v1"]
    assert f'"{CONFIG["model"]["name"]}", "--port", "8000"' in COMPOSE
    port = CONFIG["trainer"]["bind"].rpartition(":")[2]
    assert f"tcp://orchestrator:{port}" in COMPOSE
    assert "./configs/container.toml:/config.toml:ro" in COMPOSE


def test_the_orchestrator_has_no_privileges_and_writes_to_its_volumes_only() -> None:
    """A root file system that nobody writes to, no capability, and none to be got."""
    service = COMPOSE.partition("\n  orchestrator:\n")[2].partition("\n  trainer:\n")[0]
    for setting in (
        "read_only: true",
        "tmpfs: [/tmp]",
        "cap_drop: [ALL]",
        'security_opt: ["no-new-privileges:true"]',
    ):
        assert f"\n    {setting}\n" in service
    assert CONFIG["run_dir"].startswith("/runs/")
    assert "- runs:/runs\n" in service


def test_batches_stay_on_a_network_of_their_own() -> None:
    """The trainer link is unencrypted there, so the network has no way out."""
    assert CONFIG["trainer"]["insecure"] is True
    assert re.search(r"^  training:\n    internal: true$", COMPOSE, re.MULTILINE)
