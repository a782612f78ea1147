"""One record per unmasking rule, and everything that names a rule or its parameter follows it."""

from __future__ import annotations

import math
from dataclasses import asdict, fields

import pytest

from dbench.options import SamplingOptions, options_of
from dbench.serve.proto import dbench_pb2 as pb
from dbench.serve.sequence import SamplingParameters, derive_request_seed
from dbench.unmasking_rules import DEFAULT_RULE, RULE_PARAMETERS, UNMASKING_RULES, RuleParameter

BEYOND_FLOAT32 = 1e39
"""The runner keeps parameters in float32: a value that does not fit would fail the whole batch."""

OWN_FIELDS = {"unmasking_strategy", "temperature"}
IN_RANGE: dict[str, float | int] = {
    "confidence_threshold": 0.5,
    "fixed_unmask_quota": 3,
    "dynamic_unmask_factor": 1.5,
    "entropy_threshold": 0.0,
    "margin_threshold": 1.0,
}


def sampling_of(strategy: str, *names: str) -> SamplingParameters:
    """The rule with the named parameters set."""
    values = {name: IN_RANGE[name] for name in names}
    return SamplingParameters(strategy, **values)  # type: ignore[arg-type]


def own_name(strategy: str) -> str | None:
    parameter = UNMASKING_RULES[strategy].parameter
    return parameter.name if parameter else None


def test_options_records_and_messages_have_the_parameters_of_the_rules() -> None:
    wanted = OWN_FIELDS | RULE_PARAMETERS.keys()
    assert {field.name for field in fields(SamplingParameters)} == wanted
    assert {option.name for option in options_of(SamplingOptions)} == wanted
    assert {field.name for field in pb.SamplingParameters.DESCRIPTOR.fields} == wanted
    assert IN_RANGE.keys() == RULE_PARAMETERS.keys()


@pytest.mark.parametrize("parameter", RULE_PARAMETERS.values(), ids=lambda p: p.name)
def test_an_option_has_the_range_and_the_default_of_its_parameter(parameter: RuleParameter) -> None:
    (option,) = [option for option in options_of(SamplingOptions) if option.name == parameter.name]
    assert option.type is parameter.kind
    assert (option.spec.minimum, option.spec.above, option.spec.maximum) == (
        parameter.minimum,
        parameter.above,
        parameter.maximum,
    )
    assert option.spec.auto == ("none" if parameter.default is None else str(parameter.default))


def test_options_turn_into_parameters_field_by_field() -> None:
    options = SamplingOptions(unmasking_strategy="margin", margin_threshold=0.25, temperature=0.5)
    assert SamplingParameters(**asdict(options)) == SamplingParameters("margin", 0.5, margin_threshold=0.25)


@pytest.mark.parametrize("strategy", UNMASKING_RULES)
def test_a_rule_with_its_own_parameter_has_no_fault(strategy: str) -> None:
    own = own_name(strategy)
    sampling = sampling_of(strategy, *([own] if own else []))
    assert sampling.fault() == ""
    assert sampling.parameter == (IN_RANGE[own] if own else None)


@pytest.mark.parametrize("strategy", UNMASKING_RULES)
def test_only_a_rule_with_a_default_does_without_its_parameter(strategy: str) -> None:
    rule = UNMASKING_RULES[strategy]
    fault = sampling_of(strategy).fault()
    if rule.parameter is None or rule.parameter.default is not None:
        assert fault == ""
    else:
        assert (
            fault == f"unmasking_strategy {strategy} needs {rule.parameter.name}, {rule.parameter.range_text}; give it"
        )


@pytest.mark.parametrize("strategy", UNMASKING_RULES)
@pytest.mark.parametrize("foreign", RULE_PARAMETERS)
def test_a_foreign_parameter_is_a_fault_that_names_it(strategy: str, foreign: str) -> None:
    own = own_name(strategy)
    if foreign != own:
        fault = sampling_of(strategy, foreign, *([own] if own else [])).fault(lambda name: f"<{name}>")
        takes = f"takes <{own}> only" if own else "takes no parameter"
        assert fault == f"<{foreign}> {IN_RANGE[foreign]} does not belong to {strategy}, which {takes}; leave it out"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("confidence_threshold", 0.0),
        ("confidence_threshold", 1.01),
        ("fixed_unmask_quota", 0),
        ("dynamic_unmask_factor", 0.0),
        ("dynamic_unmask_factor", math.inf),
        ("dynamic_unmask_factor", BEYOND_FLOAT32),
        ("entropy_threshold", -0.1),
        ("entropy_threshold", BEYOND_FLOAT32),
        ("margin_threshold", -0.1),
        ("margin_threshold", 1.1),
        *((name, math.nan) for name in RULE_PARAMETERS),
    ],
)
def test_a_value_out_of_range_is_a_fault(name: str, value: float) -> None:
    (strategy,) = [strategy for strategy in UNMASKING_RULES if own_name(strategy) == name]
    fault = SamplingParameters(strategy, **{name: value}).fault()  # type: ignore[arg-type]
    assert fault == f"{name} is {value}, wanted {RULE_PARAMETERS[name].range_text}"


def test_ranges_read_as_words() -> None:
    texts = {name: parameter.range_text for name, parameter in RULE_PARAMETERS.items()}
    assert texts == {
        "confidence_threshold": "above 0 and at most 1",
        "fixed_unmask_quota": "at least 1",
        "dynamic_unmask_factor": "above 0 and at most 1e+06",
        "entropy_threshold": "at least 0 and at most 1e+06",
        "margin_threshold": "at least 0 and at most 1",
    }


def test_without_a_word_the_rule_is_conf_threshold_at_0_9() -> None:
    assert SamplingParameters().with_defaults() == SamplingParameters(DEFAULT_RULE, 0.0, confidence_threshold=0.9)


def test_the_host_counts_on_the_quota_and_else_on_one_position() -> None:
    assert sampling_of("conf_quota", "fixed_unmask_quota").fewest_per_step == 3
    others = [strategy for strategy in UNMASKING_RULES if strategy != "conf_quota"]
    assert {SamplingParameters(strategy).fewest_per_step for strategy in others} == {1}


def test_a_seed_comes_from_the_rule_as_it_is_decoded() -> None:
    def seed(sampling: SamplingParameters) -> int:
        return derive_request_seed((1, 2), 8, sampling, 4)

    assert seed(SamplingParameters()) == seed(SamplingParameters(confidence_threshold=0.9))
    assert seed(SamplingParameters("entropy", entropy_threshold=1)) == seed(
        SamplingParameters("entropy", entropy_threshold=1.0)
    )
    seeds = {seed(sampling_of(strategy, *filter(None, [own_name(strategy)]))) for strategy in UNMASKING_RULES}
    assert len(seeds) == len(UNMASKING_RULES)
