"""Where a value comes from, and what is refused on the way."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dbench.config import (
    ConfigLine,
    Resolved,
    option_table,
    options_from_dict,
    options_to_dict,
    resolve,
    unknown_variables,
)
from dbench.errors import OptionError
from dbench.options import (
    COMMAND_SECTIONS,
    EngineOptions,
    LoadOptions,
    Option,
    SamplingOptions,
    SearchOptions,
    ServiceOptions,
    TerminalOptions,
)
from dbench.values import read_text, read_value, wanted

SEARCH = COMMAND_SECTIONS["search-capacity"]
OPTIONS = [o for sections in COMMAND_SECTIONS.values() for o in option_table(sections).values()]
UNIQUE_OPTIONS = list({(o.section, o.name): o for o in OPTIONS}.values())
NUMBERS = [o for o in UNIQUE_OPTIONS if o.type in (int, float)]


def name_of(option: Option) -> str:
    return f"{option.section}.{option.name}"


def sections_with(option: Option) -> tuple[type, ...]:
    return next(s for s in COMMAND_SECTIONS.values() if option.section in [kind.__name__ for kind in s])


def from_flags(flags: Mapping[str, object], sections: tuple[type, ...] = SEARCH) -> Resolved:
    return resolve(sections, flags, yaml_path=None, environment={})


def from_yaml(tmp_path: Path, text: str, sections: tuple[type, ...] = SEARCH) -> Resolved:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return resolve(sections, {}, yaml_path=path, environment={})


def three_values(option: Option) -> Sequence[object]:
    """Three different legal values."""
    if option.spec.is_list:
        return [("a",), ("b", "c"), ("d",)]
    if option.spec.choices:
        return (list(option.spec.choices) * 3)[:3]
    if option.type is bool:
        return [True, False, True]
    if option.type is str:
        return ["one", "two", "three"]
    spec = option.spec
    low = spec.minimum if spec.minimum is not None else spec.above if spec.above is not None else 0
    return [option.type(low + step) for step in (0.25, 0.5, 1.0)] if option.type is float else [low, low + 1, low + 2]


def as_text(value: object) -> str:
    return ";".join(value) if isinstance(value, tuple) else str(value)


def as_flag(value: object) -> object:
    if isinstance(value, bool):
        return value
    return list(value) if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize("option", UNIQUE_OPTIONS, ids=name_of)
def test_flag_goes_before_environment_before_yaml_before_default(option: Option, tmp_path: Path) -> None:
    sections = sections_with(option)
    in_yaml, in_environment, in_flag = three_values(option)
    path = tmp_path / "options.yaml"
    plain = list(in_yaml) if isinstance(in_yaml, tuple) else in_yaml
    path.write_text(yaml.safe_dump({option.name: plain}))
    environment = {option.environment_variable: as_text(in_environment)}
    flags = {option.name: as_flag(in_flag)}

    def got(flags: Mapping[str, object], yaml_path: Path | None, environment: Mapping[str, str]) -> tuple[object, str]:
        resolved = resolve(sections, flags, yaml_path=yaml_path, environment=environment)
        return resolved.value(option.name), resolved.origins[option.name]

    assert got({}, None, {}) == (option.default, "default")
    assert got({}, path, {}) == (in_yaml, f"YAML {path}")
    assert got({}, path, environment) == (in_environment, f"environment {option.environment_variable}")
    assert got(flags, path, environment) == (in_flag, "flag")


@pytest.mark.parametrize("option", NUMBERS, ids=name_of)
def test_number_outside_its_range_is_refused_by_every_source(option: Option, tmp_path: Path) -> None:
    spec = option.spec
    sections = sections_with(option)
    wrong = [
        limit + step for limit, step in ((spec.above, 0), (spec.minimum, -1), (spec.maximum, 1)) if limit is not None
    ]
    assert wrong, "every number has a limit"
    for number in wrong:
        with pytest.raises(OptionError, match=f"^{option.flag}: got .*, wanted {wanted(option)}$"):
            from_flags({option.name: str(number)}, sections)
        with pytest.raises(OptionError, match=f"^environment variable {option.environment_variable}: got"):
            resolve(sections, {}, yaml_path=None, environment={option.environment_variable: str(number)})
        with pytest.raises(OptionError, match=rf"run\.yaml line 1: {option.name}: got"):
            from_yaml(tmp_path, f"{option.name}: {number}\n", sections)


@pytest.mark.parametrize("option", [o for o in UNIQUE_OPTIONS if o.spec.choices], ids=name_of)
def test_choice_that_does_not_exist_is_refused_with_the_nearest(option: Option) -> None:
    first = option.spec.choices[0]
    with pytest.raises(OptionError, match=rf"wanted one of {', '.join(option.spec.choices)}; did you mean {first}\?"):
        from_flags({option.name: first + "x"}, sections_with(option))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("qps", "fast", "--qps: got 'fast', wanted a number above 0"),
        ("qps", "nan", "--qps: got 'nan', wanted a number above 0"),
        ("cv", "inf", "--cv: got 'inf', wanted a number above 0"),
        ("num_requests", "2.5", "--num-requests: got '2.5', wanted a whole number at least 1"),
        ("confidence_threshold", "2", "--confidence-threshold: got '2', wanted a number above 0 and at most 1"),
        ("shuffle", "maybe", "--shuffle: got 'maybe', wanted true or false"),
        ("name", " ", "--name: got ' ', wanted text"),
    ],
)
def test_wrong_flag_is_one_line_with_flag_value_and_wish(name: str, text: str, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        from_flags({name: text})
    assert str(caught.value) == message


def test_all_at_once_is_an_infinite_rate() -> None:
    assert from_flags({"qps": "inf"}).section(LoadOptions).qps == float("inf")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("qpss: 1\n", r"line 1: qpss: unknown option; did you mean qps\?"),
        ("bogus: 1\n", "line 1: bogus: unknown option; --help lists the known ones"),
        ("num_requests: 3\nqps: fast\n", r"line 2: qps: got 'fast', wanted a number above 0"),
        ("num_requests: true\n", "line 1: num_requests: got true, wanted a whole number at least 1"),
        ("num_requests: 2.0\n", "line 1: num_requests: got 2.0, wanted a whole number"),
        ("shuffle: 1\n", "line 1: shuffle: got 1, wanted true or false"),
        ("name: 2024\n", "line 1: name: got 2024, wanted text; put it in quotes: '2024'"),
        ("qps:\n", "line 1: qps: got nothing, wanted a number above 0; leave it out for 1.0"),
        ("qps: {a: 1}\n", "line 1: qps: got {'a': 1}, wanted a number above 0"),
        ("qps: 1\nqps: 2\n", "line 2: qps stands twice"),
        ("1: 2\n", "line 1: got the key 1, wanted an option name"),
        ("- qps\n", "got a list, wanted lines of 'name: value'"),
        ("qps: 1\nname: [\n", "line 3: not valid YAML"),
        ("qps: 1\n\tname: x\n", "line 2: not valid YAML"),
        ("gen_length: 3\n", "line 1: gen_length: not an option of this command, only of submit"),
    ],
)
def test_wrong_yaml_is_one_line_with_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        from_yaml(tmp_path, text)
    assert str(tmp_path / "run.yaml") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_yaml_key_of_another_command_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="qps: not an option of this command, only of run, search-capacity"):
        from_yaml(tmp_path, "qps: 2\n", COMMAND_SECTIONS["serve"])


def test_missing_yaml_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"nowhere\.yaml: cannot be read: No such file"):
        resolve(SEARCH, {}, yaml_path=tmp_path / "nowhere.yaml", environment={})


def test_empty_yaml_file_sets_nothing(tmp_path: Path) -> None:
    assert set(from_yaml(tmp_path, "# nothing\n").origins.values()) == {"default"}


def test_yaml_takes_lists_where_flags_take_commas(tmp_path: Path) -> None:
    resolved = from_yaml(tmp_path, "qps_list: [1, 2.5]\ngpus: [cpu, cpu]\nsla: request_e2e_time:p90<=8s\n")
    assert resolved.section(SearchOptions).qps_list == "1,2.5"
    assert resolved.section(EngineOptions).gpus == "cpu,cpu"
    assert resolved.section(SearchOptions).sla == ("request_e2e_time:p90<=8s",)


def test_unknown_variable_is_reported_with_the_nearest_name() -> None:
    assert unknown_variables({"DBENCH_QPSS": "3", "DBENCH_QPS": "2", "DBENCH_GEN_LENGTH": "1", "PATH": "/bin"}) == [
        "environment variable DBENCH_QPSS belongs to no option; did you mean DBENCH_QPS?"
    ]
    assert unknown_variables({"DBENCH_BOGUS": "3"}) == ["environment variable DBENCH_BOGUS belongs to no option"]


def test_variable_of_another_command_is_passed_over() -> None:
    resolved = resolve(COMMAND_SECTIONS["serve"], {}, yaml_path=None, environment={"DBENCH_QPS": "3"})
    assert set(resolved.origins.values()) == {"default"}


def test_empty_variable_counts_as_unset() -> None:
    assert resolve(SEARCH, {}, yaml_path=None, environment={"DBENCH_NAME": ""}).origins["name"] == "default"


def test_secret_is_shown_as_set_or_unset_only() -> None:
    unset = from_flags({})
    resolved = from_flags({"api_key": "open-sesame"})
    assert resolved.section(ServiceOptions).api_key == "open-sesame"
    assert ConfigLine("api_key", "set", "flag") in resolved.lines()
    assert ConfigLine("api_key", "unset", "default") in unset.lines()
    assert json.loads(resolved.to_json())["api_key"] == {"value": "set", "origin": "flag"}
    for text in (resolved.to_yaml(), resolved.to_json(), str(resolved.lines())):
        assert "sesame" not in text


def test_wrong_secret_is_not_shown(tmp_path: Path) -> None:
    with pytest.raises(OptionError) as caught:
        from_yaml(tmp_path, "api_key: 12345\n")
    assert "12345" not in str(caught.value)


TEXTS = st.text(min_size=1, max_size=20).filter(lambda text: bool(text.strip()))


@given(
    name=TEXTS,
    qps=st.floats(min_value=1e-9, exclude_min=True, allow_nan=False),
    seed=st.integers(min_value=0, max_value=2**63),
    shuffle=st.booleans(),
    sla=st.lists(TEXTS.filter(lambda text: text.isprintable()), max_size=3),
)
def test_yaml_reads_back_to_the_same_values(
    tmp_path_factory: pytest.TempPathFactory, name: str, qps: float, seed: int, shuffle: bool, sla: list[str]
) -> None:
    path = tmp_path_factory.mktemp("yaml") / "config.yaml"
    flags = {"name": name, "qps": qps, "seed": seed, "shuffle": shuffle, "sla": sla}
    resolved = from_flags(flags).replace("gpus", "cpu,cpu", "auto: because: # 'x'\n[y]")
    path.write_text(resolved.to_yaml(), encoding="utf-8")
    again = resolve(SEARCH, {}, yaml_path=path, environment={})
    assert again.sections == resolved.sections


def test_json_holds_every_option_with_value_and_origin() -> None:
    record = json.loads(from_flags({"qps": "inf"}).to_json())
    assert record["qps"] == {"value": "inf", "origin": "flag"}
    assert record["sla"] == {"value": [], "origin": "default"}
    assert list(record) == list(option_table(SEARCH))


@pytest.mark.parametrize("kind", [EngineOptions, ServiceOptions, SamplingOptions, LoadOptions, TerminalOptions])
def test_section_survives_the_way_to_another_process(kind: type) -> None:
    section = kind()
    assert options_from_dict(kind, json.loads(json.dumps(options_to_dict(section)))) == section


def test_infinity_and_secret_survive_the_way_to_another_process() -> None:
    resolved = from_flags({"qps": "inf", "api_key": "k"})
    for kind in (LoadOptions, ServiceOptions):
        section = resolved.section(kind)
        assert options_from_dict(kind, json.loads(json.dumps(options_to_dict(section), allow_nan=False))) == section


def test_unknown_name_from_another_process_is_refused() -> None:
    with pytest.raises(OptionError, match=r"LoadOptions: qpz: unknown option; did you mean qps\?"):
        options_from_dict(LoadOptions, {"qpz": 1})


def test_override_checks_values_and_notes_the_source() -> None:
    resolved = from_flags({}).override({"qps": 3, "block_length": 16}, "job 'a'")
    assert (resolved.value("qps"), resolved.value("block_length")) == (3.0, 16)
    assert resolved.origins["qps"] == "job 'a'"
    with pytest.raises(OptionError, match="job 'a': qps: got -1, wanted a number above 0"):
        resolved.override({"qps": -1}, "job 'a'")
    with pytest.raises(OptionError, match=r"job 'a': qpz: unknown option; did you mean qps\?"):
        resolved.override({"qpz": 1}, "job 'a'")


def test_yaml_of_some_options_holds_no_others() -> None:
    assert from_flags({"qps": "2"}).to_yaml({"qps", "cv"}) == "qps: 2.0  # flag\ncv: 0.5  # default\n"


def test_replace_knows_the_names() -> None:
    with pytest.raises(KeyError):
        from_flags({}).replace("no_such_option", 1, "flag")


@pytest.mark.parametrize("option", NUMBERS, ids=name_of)
@given(data=st.data())
def test_text_and_yaml_agree_on_every_number(option: Option, data: st.DataObject) -> None:
    number = data.draw(st.integers(-(2**64), 2**64) if option.type is int else st.floats())
    reads: tuple[Callable[[], object], ...] = (
        lambda: read_text(option, repr(number), "x"),
        lambda: read_value(option, number, "x"),
        lambda: read_value(option, repr(number), "x"),
    )
    results = []
    for read in reads:
        try:
            results.append(read())
        except OptionError:
            results.append(None)
    assert results[0] == results[1] == results[2]
