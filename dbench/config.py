"""Options from every source -> one frozen record that knows where each value came from.

Precedence: default < YAML file < environment < flag. `resolve.py` then fills in what is left to dbench.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import yaml

from dbench.errors import OptionError
from dbench.json_values import strict
from dbench.options import COMMAND_SECTIONS, VARIABLE_PREFIX, Option, options_of, options_taken
from dbench.values import nearest, read_text, read_value, show

S = TypeVar("S")

DEFAULT = "default"
FLAG = "flag"
AUTO_PREFIX = "auto: "
YAML_PREFIX = "YAML "
ENVIRONMENT_PREFIX = "environment "


@dataclass(frozen=True, slots=True)
class ConfigLine:
    """One option as it is printed; a secret only as 'set' or 'unset'."""

    name: str
    value_text: str
    origin: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """The sections of one command with every value in place."""

    sections: tuple[object, ...]
    origins: Mapping[str, str]
    """Option name -> 'default', 'auto: why', 'YAML file', 'environment DBENCH_X' or 'flag'."""

    def section(self, kind: type[S]) -> S:
        """The section of this kind; KeyError when the command has none."""
        for section in self.sections:
            if isinstance(section, kind):
                return section
        raise KeyError(kind.__name__)

    def value(self, name: str) -> Any:
        return _values(self.sections)[name]

    def is_explicit(self, name: str) -> bool:
        """Somebody gave this value: it is neither the default nor filled in by dbench."""
        origin = self.origins[name]
        return origin != DEFAULT and not origin.startswith(AUTO_PREFIX)

    def replace(self, name: str, value: object, origin: str) -> Resolved:
        """The same with one value changed; the value must already be checked. KeyError for an unknown name."""
        if name not in self.origins:
            raise KeyError(name)
        sections = tuple(_with(s, name, value) if name in _names(type(s)) else s for s in self.sections)
        return Resolved(sections, MappingProxyType({**self.origins, name: origin}))

    def override(self, changes: Mapping[str, object], source: str) -> Resolved:
        """The same with parsed values of a further source, checked; raises OptionError naming `source` and the key."""
        table = option_table(type(s) for s in self.sections)
        result = self
        for name, raw in changes.items():
            place = f"{source}: {name}"
            if name not in table:
                raise OptionError(unknown_option(place, name, table))
            result = result.replace(name, read_value(table[name], raw, place), source)
        return result

    def place(self, name: str) -> str:
        """What to name in an error about this option: its flag, its YAML file and key, or its variable."""
        origin = self.origins[name]
        if origin.startswith(YAML_PREFIX):
            return f"{origin.removeprefix(YAML_PREFIX)}: {name}"
        if origin.startswith(ENVIRONMENT_PREFIX):
            return origin.removeprefix(ENVIRONMENT_PREFIX)
        return next(o.flag for s in self.sections for o in options_of(type(s)) if o.name == name)

    def lines(self) -> list[ConfigLine]:
        """Every option in the order of its declaration."""
        return [
            ConfigLine(option.name, _public_text(option, value), self.origins[option.name])
            for option, value in self._pairs()
        ]

    def to_yaml(self, names: Collection[str] | None = None) -> str:
        """A file that --config reads back to the same values, of all options or the named ones; without secrets."""
        lines = []
        for option, value in self._pairs():
            origin = " ".join(self.origins[option.name].split())
            if names is not None and option.name not in names:
                continue
            if option.spec.secret:
                lines.append(f"# {option.name} is {_public_text(option, value)}  # {origin}")
            else:
                lines.append(f"{_yaml_line(option.name, value)}  # {origin}")
        return "\n".join(lines) + "\n"

    def to_json(self) -> str:
        """One object: name -> {value, origin}; secrets as 'set' or 'unset', infinities as text."""
        record = {
            option.name: {
                "value": _public_text(option, value) if option.spec.secret else strict(value),
                "origin": self.origins[option.name],
            }
            for option, value in self._pairs()
        }
        return json.dumps(record, allow_nan=False)

    def _pairs(self) -> list[tuple[Option, Any]]:
        values = _values(self.sections)
        return [(option, values[option.name]) for option in options_taken(type(s) for s in self.sections)]


def resolve(
    sections: Sequence[type], flags: Mapping[str, object], *, yaml_path: Path | None, environment: Mapping[str, str]
) -> Resolved:
    """Values of all sources, checked one by one; raises OptionError naming the first that is wrong.

    `flags` maps option names to text, parsed values, or None for a flag that was not given.
    """
    table = option_table(sections)
    values: dict[str, object] = {option.name: option.default for kind in sections for option in options_of(kind)}
    origins = {option.name: DEFAULT for kind in sections for option in options_of(kind)}
    for entry in read_yaml(yaml_path) if yaml_path else ():
        place = f"{yaml_path} line {entry.line}: {entry.key}"
        if entry.key not in table:
            raise OptionError(unknown_option(place, entry.key, table))
        values[entry.key] = read_value(table[entry.key], entry.value, place)
        if entry.value is not None:
            origins[entry.key] = f"{YAML_PREFIX}{yaml_path}"
    for name, text in _variables(table, environment).items():
        variable = table[name].environment_variable
        values[name] = read_text(table[name], text, f"environment variable {variable}")
        origins[name] = f"{ENVIRONMENT_PREFIX}{variable}"
    for name, raw in flags.items():
        if raw is not None:
            option = table[name]
            values[name] = read_value(option, raw, option.flag)
            origins[name] = FLAG
    built = tuple(kind(**{o.name: values[o.name] for o in options_of(kind)}) for kind in sections)
    return Resolved(built, MappingProxyType(origins))


def option_table(sections: Iterable[type]) -> dict[str, Option]:
    """Name -> option that a command with these sections takes."""
    return {option.name: option for option in options_taken(sections)}


def commands_with(name: str) -> list[str]:
    """The commands that take an option of this name."""
    return [command for command, sections in COMMAND_SECTIONS.items() if name in option_table(sections)]


def unknown_option(place: str, name: str, known: Iterable[str]) -> str:
    """One line for a name that is no option here: the commands that have it, or else the nearest option."""
    elsewhere = commands_with(name)
    if elsewhere:
        return f"{place}: not an option of this command, only of {', '.join(elsewhere)}"
    return f"{place}: unknown option{nearest(name, known) or '; --help lists the known ones'}"


def options_to_dict(section: object) -> dict[str, Any]:
    """A section as plain JSON values, to hand it to another process. Secrets are in it in full: never log it."""
    return {name: strict(value) for name, value in _values((section,)).items()}


def options_from_dict(kind: type[S], mapping: Mapping[str, Any]) -> S:
    """The inverse of options_to_dict; raises OptionError for unknown names and wrong values."""
    table = option_table((kind,))
    unknown = [name for name in mapping if name not in table]
    if unknown:
        raise OptionError(unknown_option(f"{kind.__name__}: {unknown[0]}", unknown[0], table))
    return kind(**{name: read_value(table[name], raw, f"{kind.__name__}: {name}") for name, raw in mapping.items()})


@dataclass(frozen=True, slots=True)
class YamlEntry:
    """One top-level key of a YAML file."""

    key: str
    value: object
    line: int


def read_yaml(path: Path) -> list[YamlEntry]:
    """The top-level keys of a file with their line numbers; an empty file has none. Raises OptionError naming it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise OptionError(f"{path}: cannot be read: {reason}") from None
    loader = yaml.SafeLoader(text)
    try:
        return _entries(path, loader)
    except yaml.YAMLError as error:
        raise OptionError(_yaml_error(path, error)) from None
    except ValueError as error:  # a timestamp such as 2024-13-45
        raise OptionError(f"{path}: not valid YAML: {error}") from None
    finally:
        loader.dispose()


def _entries(path: Path, loader: yaml.SafeLoader) -> list[YamlEntry]:
    root = loader.get_single_node()
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        got = "a list" if isinstance(root, yaml.SequenceNode) else "plain text"
        raise OptionError(f"{path}: got {got}, wanted lines of 'name: value'")
    entries: list[YamlEntry] = []
    for key_node, value_node in root.value:
        line = key_node.start_mark.line + 1
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise OptionError(f"{path} line {line}: got the key {key!r}, wanted an option name")
        if any(entry.key == key for entry in entries):
            raise OptionError(f"{path} line {line}: {key} stands twice; keep one of them")
        entries.append(YamlEntry(key, loader.construct_object(value_node, deep=True), line))
    return entries


def _yaml_error(path: Path, error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        what = " ".join(str(error.problem or error.context).split())
        return f"{path} line {error.problem_mark.line + 1}: not valid YAML: {what}"
    return f"{path}: not valid YAML: {' '.join(str(error).split())}"


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """A line for each DBENCH_ variable that belongs to no option of any command.

    No error: a prefix is no proof that a variable was meant for dbench.
    """
    everywhere = option_table(s for sections in COMMAND_SECTIONS.values() for s in sections)
    known = {option.environment_variable for option in everywhere.values()}
    return [
        f"environment variable {variable} belongs to no option{nearest(variable, known, VARIABLE_PREFIX)}"
        for variable in sorted(environment)
        if variable.startswith(VARIABLE_PREFIX) and variable not in known
    ]


def _variables(table: Mapping[str, Option], environment: Mapping[str, str]) -> dict[str, str]:
    """Option name -> text, for this command's variables; an empty variable counts as unset."""
    texts = {name: environment.get(option.environment_variable, "") for name, option in table.items()}
    return {name: text for name, text in texts.items() if text.strip()}


def _public_text(option: Option, value: object) -> str:
    if option.spec.secret:
        return "unset" if value is None else "set"
    return show(value)


def _yaml_line(name: str, value: object) -> str:
    if isinstance(value, tuple):
        return f"{name}: {yaml.safe_dump(list(value), default_flow_style=True, width=math.inf)}".rstrip()
    return yaml.safe_dump({name: value}, width=math.inf).rstrip()


def _names(kind: Any) -> set[str]:
    return {f.name for f in fields(kind)}


def _values(sections: Iterable[Any]) -> dict[str, Any]:
    return {name: value for section in sections for name, value in asdict(section).items()}


def _with(section: Any, name: str, value: object) -> object:
    return replace(section, **{name: value})
