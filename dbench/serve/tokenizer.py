"""Text <-> token ids, from a checkpoint's tokenizer.json."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from dbench.errors import ModelError


class Tokenizer:
    """A checkpoint's tokenizer; makes no use of its chat template."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend

    def encode(self, text: str) -> list[int]:
        """Ids of the text as it stands: no begin-of-text id is added; a special token's own spelling is that token."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special ids left out."""
        return str(self._backend.decode(list(ids), skip_special_tokens=True))


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a model directory; raises ModelError when there is none that can be read."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"no tokenizer.json in {directory}; pass a directory that holds one (--tokenizer)")
    try:
        return Tokenizer(tokenizers.Tokenizer.from_file(str(path)))
    except Exception as error:  # the package raises bare Exception for a file it cannot parse
        raise ModelError(f"{path}: not a tokenizer: {error}") from error
