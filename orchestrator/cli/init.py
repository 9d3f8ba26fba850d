"""`orchestrator init` and `orchestrator schema`: what a new project begins with. Nothing is ever overwritten."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.errors import ConfigError

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def register(commands: "Commands") -> None:
    """Add the commands."""
    init = commands.add_parser(
        "init",
        help="write a small project that runs as it is",
        description="Write a small project: an environment, its test, a configuration, a trainer and a README that "
        "says how to run each. Files that are there are never overwritten.",
    )
    init.add_argument(
        "directory",
        type=Path,
        nargs="?",
        default=Path(),
        metavar="DIR",
        help="where the files go; made if it does not exist (default: the working directory)",
    )
    init.set_defaults(run=init_command)
    schema = commands.add_parser(
        "schema",
        help="print the JSON Schema of a configuration file",
        description="Print the JSON Schema of a configuration file, with the text of every setting. Editors complete "
        "and check a TOML file that names it: write it to schema.json and begin the file with "
        "the comment `#:schema ./schema.json`.",
    )
    schema.set_defaults(run=schema_command)


def init_command(arguments: argparse.Namespace) -> int:
    """Write the project, all of it or nothing."""
    from orchestrator.cli.project import FILES
    from orchestrator.config.schema import render_schema

    directory: Path = arguments.directory
    files = {**FILES, "schema.json": render_schema()}
    there = [name for name in files if (directory / name).exists()]
    if there:
        raise ConfigError(f"{directory}: {', '.join(there)} would be overwritten; choose another directory")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            # "x": whatever appears in the meantime is not ours to replace.
            with (directory / name).open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be written: {error}") from None
    print(f"wrote {', '.join(files)} to {directory.resolve()}")
    print(f"next: read {directory / 'README.md'}, or at once:")
    if directory.resolve() != Path.cwd():
        print(f"  cd {directory}")
    print('  orchestrator env try spelling:Spelling --args \'{"words": ["cat"]}\'')
    print("  orchestrator check config.toml --deep")
    return 0


def schema_command(arguments: argparse.Namespace) -> int:
    """Print the schema."""
    from orchestrator.config.schema import render_schema

    print(render_schema(), end="")
    return 0
