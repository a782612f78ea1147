"""Every option is declared once and completely."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import pytest

from dbench.config import option_table, resolve
from dbench.errors import OptionError
from dbench.options import COMMAND_SECTIONS, Option, SamplingOptions, options_of, options_taken
from dbench.unmasking_rules import MAX_TEMPERATURE

SECTIONS = sorted({s for sections in COMMAND_SECTIONS.values() for s in sections}, key=lambda s: s.__name__)
OPTIONS = [option for section in SECTIONS for option in options_of(section)]


def name_of(option: Option) -> str:
    return f"{option.section}.{option.name}"


@pytest.mark.parametrize("option", OPTIONS, ids=name_of)
def test_option_has_a_help_sentence_and_a_panel(option: Option) -> None:
    assert option.spec.help.endswith(".")
    assert "[" not in option.spec.help
    assert option.spec.panel


@pytest.mark.parametrize("option", OPTIONS, ids=name_of)
def test_option_has_a_flag_a_yaml_key_and_a_variable(option: Option) -> None:
    assert option.flag == "--" + option.name.replace("_", "-")
    assert option.environment_variable == "DBENCH_" + option.name.upper()
    assert option.name.isidentifier()


@pytest.mark.parametrize("option", OPTIONS, ids=name_of)
def test_option_without_a_default_says_what_it_becomes(option: Option) -> None:
    assert (option.default is None) == bool(option.spec.auto)


@pytest.mark.parametrize("option", OPTIONS, ids=name_of)
def test_default_is_within_the_option_s_own_limits(option: Option) -> None:
    spec = option.spec
    if spec.is_list:
        assert isinstance(option.default, tuple)
    elif option.default is not None:
        assert not spec.choices or option.default in spec.choices
        assert spec.minimum is None or option.default >= spec.minimum
        assert spec.above is None or option.default > spec.above
        assert spec.maximum is None or option.default <= spec.maximum
        assert type(option.default) is option.type


@pytest.mark.parametrize("section", SECTIONS)
def test_section_is_a_frozen_dataclass_of_options(section: type) -> None:
    assert is_dataclass(section)
    assert [o.name for o in options_of(section)] == [f.name for f in fields(section)]
    with pytest.raises(AttributeError):
        setattr(section(), fields(section)[0].name, None)


@pytest.mark.parametrize("command", COMMAND_SECTIONS)
def test_no_name_stands_twice_in_a_command(command: str) -> None:
    sections = COMMAND_SECTIONS[command]
    assert len(option_table(sections)) == len(list(options_taken(sections)))


def test_options_of_one_name_have_one_type_everywhere() -> None:
    types: dict[str, set[type]] = {}
    for option in OPTIONS:
        types.setdefault(option.name, set()).add(option.type)
    assert [name for name, seen in types.items() if len(seen) > 1] == []


def test_temperature_beyond_what_a_server_takes_is_no_option() -> None:
    with pytest.raises(OptionError, match="temperature"):
        resolve((SamplingOptions,), {"temperature": "1e39"}, yaml_path=None, environment={})
    given = resolve((SamplingOptions,), {"temperature": "1e6"}, yaml_path=None, environment={})
    assert given.section(SamplingOptions).temperature == MAX_TEMPERATURE
