"""One option's value: read from text or from YAML, checked against its declaration, written for people."""

from __future__ import annotations

import math
from collections.abc import Iterable

from dbench.errors import OptionError, near_name
from dbench.options import Option

LIST_SEPARATOR = ";"
"""Between the items of a list option in an environment variable; SLA rules hold commas, never semicolons."""

TRUE_WORDS = ("true", "yes", "on", "1")
FALSE_WORDS = ("false", "no", "off", "0")

MAX_SHOWN = 80
"""Characters of a wrong value that an error line shows."""


def read_text(option: Option, text: str, place: str) -> object:
    """The typed, checked value of a flag or an environment variable. Raises OptionError naming `place`."""
    if option.spec.is_list:
        return tuple(_read(option, item, place) for item in _items(text))
    return _read(option, text, place)


def read_value(option: Option, raw: object, place: str) -> object:
    """The typed, checked value of something already parsed (YAML, JSON); strings are read as text.

    None leaves an option unset and is refused where an option has no unset state.
    """
    if raw is None:
        if option.default is None:
            return None
        raise OptionError(f"{place}: got nothing, wanted {wanted(option)}; leave it out for {show(option.default)}")
    if option.spec.is_list:
        items = raw if isinstance(raw, list | tuple) else [raw]
        return tuple(_read(option, item, place) for item in items)
    if option.type is str and isinstance(raw, list | tuple):
        return _read(option, ",".join(str(_parsed(option, _as_text(item), place)) for item in raw), place)
    return _read(option, raw, place)


def wanted(option: Option) -> str:
    """What the option takes, in words: 'a number above 0', 'one of gamma, poisson'."""
    spec = option.spec
    if spec.choices:
        return f"one of {', '.join(spec.choices)}"
    if option.type is bool:
        return "true or false"
    if option.type is str:
        return "text"
    noun = "a whole number" if option.type is int else "a number"
    limits = []
    if spec.above is not None:
        limits.append(f"above {_number(spec.above)}")
    if spec.minimum is not None:
        limits.append(f"at least {_number(spec.minimum)}")
    if spec.maximum is not None:
        limits.append(f"at most {_number(spec.maximum)}")
    return f"{noun} {' and '.join(limits)}" if limits else noun


def show(value: object) -> str:
    """A value as a person would write it."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"{LIST_SEPARATOR} ".join(show(item) for item in value) or "none"
    return str(value)


def default_text(option: Option) -> str:
    """The default for help and docs: the value, or what an unset option becomes."""
    if option.default is None:
        return option.spec.auto or "unset"
    return show(option.default)


def nearest(got: str, known: Iterable[str], prefix: str = "") -> str:
    """'; did you mean ...?' with the known name that was probably meant, or nothing.

    `prefix` is what all of them begin with; sharing it makes no two names alike.
    """
    near = near_name(got.removeprefix(prefix), (name.removeprefix(prefix) for name in known))
    return f"; did you mean {prefix}{near}?" if near else ""


def counted(number: int, one: str, many: str | None = None) -> str:
    """'1 token', '2 tokens'; `many` for a plural that is more than an s."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.split(LIST_SEPARATOR) if item.strip()]


def _as_text(raw: object) -> object:
    """List items of a text option may be numbers: `qps_list: [1, 2.5]`."""
    return str(raw) if isinstance(raw, int | float) and not isinstance(raw, bool) else raw


def _parsed(option: Option, raw: object, place: str) -> object:
    if isinstance(raw, str):
        return _scalar(option, raw, place)
    if option.type is str:
        hint = "" if option.spec.secret else f"; put it in quotes: '{show(raw)}'"
        raise OptionError(f"{place}: got {_shown(option, raw)}, wanted text{hint}")
    if isinstance(raw, bool) is (option.type is bool):
        if isinstance(raw, bool) or (option.type is int and isinstance(raw, int)):
            return raw
        if option.type is float and isinstance(raw, int | float):
            return _float(option, raw, raw, place)
    raise _refused(option, raw, place)


def _scalar(option: Option, text: str, place: str) -> object:
    word = text.strip()
    if option.type is str:
        if not word:
            raise _refused(option, text, place)
        return text
    if option.type is bool:
        if word.lower() in TRUE_WORDS:
            return True
        if word.lower() in FALSE_WORDS:
            return False
        raise _refused(option, text, place)
    try:
        number = int(word) if option.type is int else float(word)
    except ValueError:
        raise _refused(option, text, place) from None
    return number if option.type is int else _float(option, number, text, place)


def _float(option: Option, number: float, raw: object, place: str) -> float:
    try:
        value = float(number)
    except OverflowError:
        raise _refused(option, raw, place) from None
    if math.isnan(value) or (math.isinf(value) and not option.spec.allow_infinity):
        raise _refused(option, raw, place)
    return value


def _read(option: Option, raw: object, place: str) -> object:
    """Parsed, then held against choices and limits."""
    value, spec = _parsed(option, raw, place), option.spec
    if spec.choices and value not in spec.choices:
        near = nearest(str(value), spec.choices)
        raise OptionError(f"{place}: got {_shown(option, raw)}, wanted {wanted(option)}{near}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        too_small = spec.minimum is not None and value < spec.minimum
        too_large = spec.maximum is not None and value > spec.maximum
        if too_small or too_large or (spec.above is not None and value <= spec.above):
            raise _refused(option, raw, place)
    return value


def _refused(option: Option, got: object, place: str) -> OptionError:
    return OptionError(f"{place}: got {_shown(option, got)}, wanted {wanted(option)}")


def _shown(option: Option, got: object) -> str:
    if option.spec.secret:
        return f"a {type(got).__name__} (not shown)"
    text = show(got) if isinstance(got, bool) else repr(got)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def _number(limit: float) -> str:
    return str(int(limit)) if float(limit).is_integer() else str(limit)
