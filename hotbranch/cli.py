"""The command line: `hotbranch COMMAND [flags]`, generated from the settings."""

import argparse
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import hotbranch
from hotbranch import log
from hotbranch.flags import Parser, add_flags
from hotbranch.load_settings import FIELDS, SettingsError, flag, load_settings, suggestion
from hotbranch.settings import (
    Common,
    DoctorSettings,
    Logged,
    ReplicaSettings,
    RouterSettings,
    SimulateSettings,
    UpSettings,
)


@dataclass(frozen=True, slots=True)
class Command:
    """`entry` is a module with `run(settings) -> exit status`, imported only to be run.

    `bare` names the setting that an argument without a flag gives. With `prepares`, the model is
    made ready first; a replica does it itself, for it tells meanwhile that it is loading.
    """

    summary: str
    settings: type[Logged]
    entry: str | None
    bare: str = ""
    prepares: bool = True


COMMANDS: Mapping[str, Command] = {
    "up": Command("start replicas and a router on Ray", UpSettings, "deploy.up"),
    "router": Command("run one router", RouterSettings, "router.main"),
    "replica": Command("run one replica", ReplicaSettings, "replicas.main", prepares=False),
    "simulate": Command(
        "play a trace on a simulated fleet",
        SimulateSettings,
        "bench.fleet.main",
        bare="trace",
        prepares=False,
    ),
    "doctor": Command(
        "examine a running fleet: what is wrong, and how to mend it",
        DoctorSettings,
        "deploy.doctor.main",
        bare="url",
        prepares=False,
    ),
    "model": Command("make the model ready and print its directory", Common, None),
}
SOURCES = (
    "A setting comes, strongest first, from its flag, its environment variable, the YAML file "
    "given by --config or HOTBRANCH_CONFIG, and its default."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status is 2 for wrong flags or settings, and 130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    program = " ".join(["hotbranch", *argv[:1]]) if argv and argv[0] in COMMANDS else "hotbranch"
    try:
        arguments = parse(argv)
        name: str | None = arguments.pop("command", None)
        if name is None:
            _parser().print_help()
            return 0
        if name == "version":
            print(hotbranch.__version__)
            return 0
        config = arguments.pop("config", None)
        command = COMMANDS[name]
        settings = load_settings(command.settings, arguments, os.environ, config)
        log.setup(settings.log_level, settings.log_format, name)
        return _run(program, command, settings)
    except SettingsError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def parse(argv: Sequence[str]) -> dict[str, Any]:
    """The flags of `argv` by setting name, with `command` and `config`. Raises SettingsError."""
    known, extra = _parser().parse_known_args(argv)
    arguments = vars(known)
    command = COMMANDS.get(arguments.get("command") or "")
    if extra and command and command.bare and not extra[0].startswith("-"):
        # Not argparse's: it takes an optional argument for absent when a flag comes first.
        arguments[command.bare] = extra.pop(0)
    if extra:
        raise SettingsError(_unexpected(extra[0], command))
    return arguments


def _unexpected(argument: str, command: Command | None) -> str:
    if not argument.startswith("-"):
        return f"unexpected argument {argument!r}"
    given = argument.partition("=")[0]
    own = command.settings.model_fields if command else {}
    if given.removeprefix("--").replace("-", "_") in FIELDS:
        return f"{given} belongs to another command" if command else f"{given} follows a command"
    return f"unknown flag {given}{suggestion(given, [flag(name) for name in own])}"


def _run(program: str, command: Command, settings: Logged) -> int:
    """Make the model ready where it is needed, with its progress shown, then run the command."""
    if command.entry and not command.prepares:
        return int(importlib.import_module(command.entry).run(settings))
    assert isinstance(settings, Common), "what is prepared is its model"
    from hotbranch import embedded, progress  # only now: --help need not wait for numpy

    try:
        with progress.shown(sys.stderr) as report:
            _, directory = embedded.resolve_model(settings.model, settings.cache_dir, report)
    except embedded.ModelError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    if command.entry is None:
        print(directory)
        return 0
    return int(importlib.import_module(command.entry).run(settings))


def _parser() -> Parser:
    parser = Parser(
        prog="hotbranch",
        description="A cache-aware router for LLM serving, and the replicas behind it.",
        epilog=f"`hotbranch COMMAND --help` lists the settings of a command. {SOURCES}",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=hotbranch.__version__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, command in COMMANDS.items():
        own = commands.add_parser(
            name,
            help=command.summary,
            description=command.summary[0].upper() + command.summary[1:] + ".",
            usage=" ".join(["hotbranch", name, *filter(None, [command.bare.upper()]), "[flags]"]),
            epilog=SOURCES,
            argument_default=argparse.SUPPRESS,
            formatter_class=partial(argparse.HelpFormatter, max_help_position=34),
            allow_abbrev=False,
        )
        own.add_argument("--config", type=Path, metavar="YAML", help="settings file")
        add_flags(own, command.settings)
    commands.add_parser("version", help="print the version", allow_abbrev=False)
    return parser
