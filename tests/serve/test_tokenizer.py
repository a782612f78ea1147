"""Text and ids: any text survives, special tokens keep their places."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbench.errors import ModelError
from dbench.models import embedded_directory
from dbench.serve.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(embedded_directory())


@given(st.text())
def test_any_text_round_trips_as_its_bytes(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert ids == list(text.encode())
    assert TOKENIZER.decode(ids) == text


def test_special_ids_are_left_out_of_text() -> None:
    assert TOKENIZER.decode([256, 104, 258, 105, 257]) == "hi"


def test_a_special_token_spelled_out_is_one_id() -> None:
    assert TOKENIZER.encode("a<|eot_id|>") == [97, 261]


def test_broken_bytes_still_give_text() -> None:
    assert TOKENIZER.decode([104, 255]) == "h�"


def test_transformers_reads_the_same_tokenizer_with_a_chat_template() -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(str(embedded_directory()))
    assert theirs.encode("hé 😀", add_special_tokens=False) == TOKENIZER.encode("hé 😀")
    chat = theirs.apply_chat_template([{"role": "user", "content": " hi "}], tokenize=False, add_generation_prompt=True)
    assert isinstance(chat, str)
    ids = TOKENIZER.encode(chat)
    assert ids[0] == 256
    assert ids.count(256) == 1
    assert TOKENIZER.decode(ids) == "user\n\nhiassistant\n\n"


def test_a_missing_tokenizer_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json, or vocab\.json and merges\.txt in"):
        load_tokenizer(tmp_path)


def test_a_broken_tokenizer_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="not a tokenizer"):
        load_tokenizer(tmp_path)
