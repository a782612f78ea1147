"""Messages -> one text, by the chat template that a checkpoint brings.

A template is a program by strangers: it runs in jinja2's sandbox, which gives it neither files nor imports.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dbench.errors import ModelError, one_line
from dbench.serve.tokenizer_files import CONFIG_FILE, read_json_object

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_KEY = "chat_template"
TOKEN_SUFFIX = "_token"
"""Keys of tokenizer_config.json such as bos_token: a template may name them."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    """system, user or assistant."""
    content: str


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """How a model wants a conversation written down."""

    place: Path
    """The file that it comes from."""
    source: str
    tokens: Mapping[str, str]
    """Names that the template may use -> special tokens: bos_token, eos_token, ..."""

    def render(self, messages: Sequence[Message]) -> str:
        """The conversation as text, up to where the assistant's next turn begins. Raises ModelError."""
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        try:
            template = environment.from_string(self.source)
            return template.render(
                messages=[asdict(message) for message in messages], add_generation_prompt=True, **self.tokens
            )
        except jinja2.TemplateError as error:
            raise ModelError(f"{self.place}: the chat template refused the messages: {one_line(error)}") from error
        except Exception as error:  # a template can fail in any way that Python can
            raise ModelError(f"{self.place}: the chat template failed: {one_line(error)}") from error


def read_chat_template(directory: Path) -> ChatTemplate | None:
    """The template of a directory, from its own file or tokenizer_config.json; None without one. Raises ModelError."""
    path = directory / CONFIG_FILE
    config = read_json_object(path) if path.is_file() else {}
    own_file = directory / TEMPLATE_FILE
    if own_file.is_file():
        try:
            return ChatTemplate(own_file, own_file.read_text(encoding="utf-8"), _tokens(config))
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{own_file}: cannot be read: {one_line(error)}") from error
    source = config.get(TEMPLATE_KEY)
    if isinstance(source, list):  # several templates by name
        source = _default_of(path, source)
    if source is None:
        return None
    if not isinstance(source, str):
        raise ModelError(f"{path}: {TEMPLATE_KEY} is a {type(source).__name__}, wanted text")
    return ChatTemplate(path, source, _tokens(config))


def _default_of(path: Path, templates: list[Any]) -> Any:
    """The template named default; None without one."""
    for entry in templates:
        if not isinstance(entry, dict):
            raise ModelError(f"{path}: {TEMPLATE_KEY} lists a {type(entry).__name__}, wanted objects with a name")
        if entry.get("name") == "default":
            return entry.get("template")
    return None


def _tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and the like; each is a text, or an object with the text as its content."""
    found = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith(TOKEN_SUFFIX) and isinstance(text, str):
            found[key] = text
    return found


def _to_json(value: Any, indent: int | None = None) -> str:
    """Templates expect JSON as it is, without the HTML escapes of jinja2's own filter."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)
