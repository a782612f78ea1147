"""What stands in the tokenizer files of a checkpoint, read without loading a tokenizer.

Checkpoints hold either tokenizer.json, or the older pair vocab.json and merges.txt whose added tokens are listed in
tokenizer_config.json.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dbench.errors import ModelError

FAST_FILE = "tokenizer.json"
VOCABULARY_FILE, MERGES_FILE = "vocab.json", "merges.txt"
CONFIG_FILE = "tokenizer_config.json"
WANTED_FILES = f"{FAST_FILE}, or {VOCABULARY_FILE} and {MERGES_FILE}"


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that stands beside the vocabulary that was learned."""

    id: int
    text: str
    is_special: bool
    """It means something to the model and is no text."""


def has_tokenizer(directory: Path) -> bool:
    """The directory holds one of the two kinds of tokenizer."""
    return (directory / FAST_FILE).is_file() or has_vocabulary_and_merges(directory)


def has_vocabulary_and_merges(directory: Path) -> bool:
    return (directory / VOCABULARY_FILE).is_file() and (directory / MERGES_FILE).is_file()


def special_tokens(directory: Path) -> dict[str, int]:
    """Text -> id of the special tokens; none where no file lists them. Raises ModelError for an unreadable file."""
    return {token.text: token.id for token in added_tokens(directory) if token.is_special}


def added_tokens(directory: Path) -> list[AddedToken]:
    """The added tokens by id, from tokenizer.json or else tokenizer_config.json. Raises ModelError."""
    path = next((directory / name for name in (FAST_FILE, CONFIG_FILE) if (directory / name).is_file()), None)
    if path is None:
        return []
    values = read_json_object(path)
    try:
        if path.name == FAST_FILE:
            pairs = [(int(token["id"]), token) for token in values.get("added_tokens", [])]
        else:
            pairs = [(int(number), token) for number, token in values.get("added_tokens_decoder", {}).items()]
        tokens = [AddedToken(number, str(token["content"]), bool(token.get("special"))) for number, token in pairs]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: odd list of added tokens: {error!r}; download the file again") from error
    return sorted(tokens, key=lambda token: token.id)


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint. Raises ModelError."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path}: holds a {type(values).__name__}, wanted a JSON object")
    return values
