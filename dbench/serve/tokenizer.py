"""Text <-> token ids, from a checkpoint's tokenizer files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from dbench.errors import ModelError, one_line, unknown_name
from dbench.serve.chat import ChatTemplate, Message, read_chat_template
from dbench.serve.tokenizer_files import (
    CONFIG_FILE,
    FAST_FILE,
    MERGES_FILE,
    VOCABULARY_FILE,
    WANTED_FILES,
    added_tokens,
    has_vocabulary_and_merges,
    read_json_object,
)

QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Contractions, words, single digits, punctuation, line ends, spaces: what Qwen2 cuts text into before merging."""

WORD_PATTERNS = {"DreamTokenizer": QWEN2_WORDS, "Qwen2Tokenizer": QWEN2_WORDS}
"""tokenizer_class of tokenizer_config.json -> how text is cut, where the tokenizer is vocab.json and merges.txt."""


class Tokenizer:
    """A checkpoint's tokenizer and its chat template."""

    def __init__(self, backend: tokenizers.Tokenizer, template: ChatTemplate | None, directory: Path) -> None:
        self._backend = backend
        self._template = template
        self._directory = directory

    def encode(self, text: str) -> list[int]:
        """Ids of the text as it stands: no begin-of-text id is added; a special token's own spelling is that token."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation by the checkpoint's template, up to where the answer begins.

        What the template writes is all there is: it brings the begin-of-text id where the model wants one.
        Raises ModelError without a template, and for messages that it refuses.
        """
        if self._template is None:
            raise ModelError(f"no chat template in {self._directory}; send plain text or token ids instead")
        return self.encode(self._template.render(messages))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special ids left out."""
        return str(self._backend.decode(list(ids), skip_special_tokens=True))


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a model directory; raises ModelError when there is none that can be read."""
    if (directory / FAST_FILE).is_file():
        backend = _from_one_file(directory / FAST_FILE)
    elif has_vocabulary_and_merges(directory):
        backend = _from_vocabulary_and_merges(directory)
    else:
        raise ModelError(f"no {WANTED_FILES} in {directory}; name a directory that holds a tokenizer (--tokenizer)")
    return Tokenizer(backend, read_chat_template(directory), directory)


def _from_one_file(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exception for a file it cannot parse
        raise ModelError(f"{path}: not a tokenizer: {error}") from error


def _from_vocabulary_and_merges(directory: Path) -> tokenizers.Tokenizer:
    """Byte-level BPE as Qwen2 and Dream have it; added tokens must get the ids that the checkpoint says."""
    config_path = directory / CONFIG_FILE
    name = str(read_json_object(config_path).get("tokenizer_class"))
    if name not in WORD_PATTERNS:
        raise ModelError(f"{config_path}: {unknown_name('tokenizer_class', name, WORD_PATTERNS)}")
    try:
        model = models.BPE.from_file(str(directory / VOCABULARY_FILE), str(directory / MERGES_FILE))
    except Exception as error:  # as above
        raise ModelError(
            f"{directory}: {VOCABULARY_FILE} and {MERGES_FILE} are not a tokenizer: {one_line(error)}"
        ) from error
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(tokenizers.Regex(WORD_PATTERNS[name]), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    for token in added_tokens(directory):
        backend.add_tokens([tokenizers.AddedToken(token.text, normalized=False, special=token.is_special)])
        got = backend.token_to_id(token.text)
        if got != token.id:
            raise ModelError(f"{config_path}: {token.text} has id {token.id}, {VOCABULARY_FILE} makes it {got}")
    return backend
