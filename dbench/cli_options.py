"""Option sections -> the flags of a command, for Typer.

Typer hands every value over as text; `config.py` reads and checks it, so that a flag, a YAML key and
an environment variable obey one rule and speak with one voice.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from dbench.config import Resolved, resolve
from dbench.options import COMMAND_SECTIONS, Option, options_taken
from dbench.values import default_text

SHOWN_TYPES = {int: "INT", float: "FLOAT", str: "TEXT"}

GENERAL_PANEL = "General"
CONFIG_HELP = "YAML file of options; environment variables and flags go before it."
HELP_COLUMN = 34
"""Flags wider than this stand on a line of their own, in full."""


@dataclass(frozen=True, slots=True)
class Invocation:
    """One call of a command: what the user typed, still as text."""

    command: Command
    flags: Mapping[str, object]
    """Option name -> text, bool, list of texts, or None when the flag was not given."""
    arguments: Mapping[str, str | None]
    config: Path | None
    json: bool

    def resolve(self) -> Resolved:
        """Flags over environment over YAML over defaults; raises OptionError."""
        return resolve(
            COMMAND_SECTIONS[self.command.name], self.flags, yaml_path=self.config, environment=dict(os.environ)
        )


@dataclass(frozen=True, slots=True)
class Argument:
    """A positional argument."""

    name: str
    help: str
    required: bool = True


@dataclass(frozen=True, slots=True)
class Command:
    """One command of the program; its options are COMMAND_SECTIONS[name]."""

    name: str
    help: str
    handler: Callable[[Invocation], int]
    arguments: tuple[Argument, ...] = ()
    has_json: bool = False
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Option name -> further flags for it."""
    hidden: tuple[str, ...] = ()
    """Options of its sections that it refuses with a reason of its own, or that change nothing here."""


def typer_function(command: Command) -> Callable[..., Invocation]:
    """A function whose signature is the command's flags and arguments; it only gathers what was typed."""
    own = [_argument(argument) for argument in command.arguments]
    options = [
        _flag(option, command.aliases.get(option.name, ()), hidden=option.name in command.hidden)
        for option in options_taken(COMMAND_SECTIONS[command.name])
    ]
    extra = [_parameter("config", str, typer.Option(None, "--config", metavar="FILE", help=CONFIG_HELP))]
    if command.has_json:
        extra.append(_parameter("json", bool, typer.Option(False, "--json", help="Results as JSON on stdout.")))

    def gather(**given: Any) -> Invocation:
        config = given.pop("config")
        json = bool(given.pop("json", False))
        arguments = {argument.name: given.pop(_key(argument)) for argument in command.arguments}
        return Invocation(command, given, arguments, Path(config) if config is not None else None, json)

    gather.__signature__ = inspect.Signature([*own, *extra, *options])  # type: ignore[attr-defined]
    gather.__annotations__ = {p.name: p.annotation for p in (*own, *extra, *options)}
    gather.__doc__ = command.help
    return gather


class PanelCommand(TyperCommand):
    """A command whose --help lists its options panel by panel, as plain text that never cuts a flag."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            if parameter.param_type_name == "argument":
                panels.setdefault("Arguments", []).append((parameter.metavar or record[0], record[1]))
                continue
            panel = parameter.rich_help_panel or GENERAL_PANEL  # type: ignore[attr-defined]
            panels.setdefault(panel, []).append((_flag_column(parameter), record[1]))
        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl(rows, col_max=HELP_COLUMN)


def _flag_column(parameter: Any) -> str:
    """'--qps FLOAT', '--[no-]shuffle', '--json'."""
    name = ", ".join(parameter.opts)
    if parameter.secondary_opts:
        return name.replace("--", "--[no-]", 1)
    return name if parameter.is_flag else f"{name} {parameter.metavar}"


def _flag(option: Option, aliases: tuple[str, ...], *, hidden: bool) -> inspect.Parameter:
    spec = option.spec
    text = f"{spec.help} (default: {default_text(option)})"
    common: dict[str, Any] = {"rich_help_panel": spec.panel, "help": text, "hidden": hidden}
    if option.type is bool and not spec.is_list:
        flags = f"{option.flag}/--no-{option.flag.removeprefix('--')}"
        return _parameter(option.name, bool, typer.Option(None, flags, **common))
    kind = list[str] if spec.is_list else str
    metavar = "|".join(spec.choices) if spec.choices else SHOWN_TYPES[option.type]
    return _parameter(option.name, kind, typer.Option(None, option.flag, *aliases, metavar=metavar, **common))


def _argument(argument: Argument) -> inspect.Parameter:
    default = ... if argument.required else None
    info = typer.Argument(default, metavar=argument.name.upper(), help=argument.help)
    return _parameter(_key(argument), str, info)


def _key(argument: Argument) -> str:
    """A positional argument may carry the name of an option, as `dbench serve MODEL` does."""
    return f"argument_{argument.name}"


def _parameter(name: str, kind: Any, info: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=kind | None)
