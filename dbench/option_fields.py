"""How an option is declared: a dataclass field with help, panel, range and choices."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dbench.unmasking_rules import RULE_PARAMETERS


@dataclass(frozen=True, slots=True)
class OptionSpec:
    """What a declaration says beside the type and the default."""

    help: str
    panel: str
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    choices: tuple[str, ...] = ()
    secret: bool = False
    serve_only: bool = False  # a command that starts its own server sets this itself, or has no use for it
    is_list: bool = False
    allow_infinity: bool = False
    auto: str = ""  # what an unset value becomes, for --help
    mode: str = ""  # the only serving mode that has it; empty: all have


def option(default: Any, help: str, *, panel: str, **spec: Any) -> Any:
    """A dataclass field that declares an option; `spec` holds fields of OptionSpec."""
    return field(default=default, metadata={"option": OptionSpec(help=help, panel=panel, **spec)})


def rule_option(name: str) -> Any:
    """A dataclass field for the parameter of an unmasking rule: unset unless given, in the parameter's range."""
    p = RULE_PARAMETERS[name]
    auto = "none" if p.default is None else str(p.default)
    return option(None, p.help, panel="Sampling", minimum=p.minimum, maximum=p.maximum, above=p.above, auto=auto)


def tls_ca_option(panel: str) -> Any:
    """A dataclass field for the certificates that one who dials a server trusts."""
    text = "File with the certificates to trust, in PEM, for a server that speaks TLS: its own, or its authority's."
    return option(None, text, panel=panel, auto="no TLS")
