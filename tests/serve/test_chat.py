"""Conversations as token ids: the checkpoint's template, in a sandbox, and the tokenizers of both families."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbench.errors import ModelError
from dbench.models import embedded_directory
from dbench.serve.chat import ChatTemplate, Message, read_chat_template
from dbench.serve.families import read_model_config
from dbench.serve.tokenizer import Tokenizer, load_tokenizer
from tests.serve.published_layouts import DREAM_IDS, LLADA_IDS, write_dream, write_llada

HELLO = [Message("user", " hello ")]


@pytest.fixture(scope="module")
def llada(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llada(tmp_path_factory.mktemp("llada"))


@pytest.fixture(scope="module")
def dream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dream(tmp_path_factory.mktemp("dream"))


@pytest.fixture(scope="module")
def dream_tokenizer(dream: Path) -> Tokenizer:
    return load_tokenizer(dream)


def template(source: str) -> ChatTemplate:
    return ChatTemplate(Path("here.jinja"), source, {"bos_token": "<s>"})


def test_a_chat_with_llada_begins_with_one_bos_and_ends_where_the_answer_starts(llada: Path) -> None:
    tokenizer = load_tokenizer(llada)
    start, end = LLADA_IDS["<|start_header_id|>"], LLADA_IDS["<|end_header_id|>"]
    ids = tokenizer.encode_chat(HELLO)
    assert ids == [
        LLADA_IDS["<|startoftext|>"],
        *(start, *tokenizer.encode("user"), end, *tokenizer.encode("\n\n"), *tokenizer.encode("hello")),
        LLADA_IDS["<|eot_id|>"],
        *(start, *tokenizer.encode("assistant"), end, *tokenizer.encode("\n\n")),
    ]
    assert tokenizer.decode(ids) == "user\n\nhelloassistant\n\n"


def test_a_chat_with_dream_is_chatml_with_a_system_turn(dream: Path) -> None:
    tokenizer = load_tokenizer(dream)
    ids = tokenizer.encode_chat(HELLO)
    start, end = DREAM_IDS["<|im_start|>"], DREAM_IDS["<|im_end|>"]
    turns = [("system\nBe helpful.", True), ("user\n hello ", True), ("assistant\n", False)]
    wanted = []
    for text, ends in turns:
        wanted += [start, *tokenizer.encode(text), *([end, *tokenizer.encode("\n")] if ends else [])]
    assert ids == wanted
    assert DREAM_IDS["<|beginoftext|>"] not in ids


def test_a_longer_chat_keeps_its_turns_in_order(dream: Path) -> None:
    messages = [Message("system", "S"), Message("user", "U"), Message("assistant", "A"), Message("user", "V")]
    text = load_tokenizer(dream).decode(load_tokenizer(dream).encode_chat(messages))
    assert text == "system\nS\nuser\nU\nassistant\nA\nuser\nV\nassistant\n"


def test_special_ids_of_both_layouts_are_known_to_the_model(llada: Path, dream: Path) -> None:
    config = read_model_config(llada)
    assert config.eos_token_ids == (LLADA_IDS["<|endoftext|>"], LLADA_IDS["<|eot_id|>"])
    assert config.reserved_token_ids == tuple(LLADA_IDS.values())
    config = read_model_config(dream)
    assert config.eos_token_ids == (DREAM_IDS["<|endoftext|>"], DREAM_IDS["<|im_end|>"])
    assert config.reserved_token_ids == tuple(DREAM_IDS[text] for text in DREAM_IDS if text != "<tool_call>")


@given(text=st.text())
def test_text_survives_a_tokenizer_of_vocabulary_and_merges(dream_tokenizer: Tokenizer, text: str) -> None:
    assert dream_tokenizer.decode(dream_tokenizer.encode(text)) == unicodedata.normalize("NFC", text)


@pytest.mark.parametrize("text", ["hello the 1234 don't!\n\n  x", "  hello\r\n\tthe", "ＡＢ c<|im_end|><tool_call>x"])
def test_vocabulary_and_merges_are_read_as_transformers_reads_qwen2(dream: Path, text: str) -> None:
    from tokenizers import AddedToken
    from transformers import Qwen2Tokenizer

    merges = [tuple(line.split(" ")) for line in (dream / "merges.txt").read_text(encoding="utf-8").splitlines()[1:]]
    vocabulary = json.loads((dream / "vocab.json").read_text(encoding="utf-8"))
    theirs = Qwen2Tokenizer(vocab=vocabulary, merges=merges)  # type: ignore[arg-type]
    theirs.add_tokens([AddedToken(text, special=text != "<tool_call>") for text in DREAM_IDS])
    assert load_tokenizer(dream).encode(text) == theirs.encode(text, add_special_tokens=False)


def test_merges_are_applied(dream: Path) -> None:
    tokenizer = load_tokenizer(dream)
    assert len(tokenizer.encode("hello")) == 1
    assert len(tokenizer.encode("hello the")) == 3


def test_text_of_added_tokens_is_kept_unless_they_are_special(dream: Path) -> None:
    tokenizer = load_tokenizer(dream)
    assert tokenizer.decode(tokenizer.encode("a<tool_call>b<|im_end|>c")) == "a<tool_call>bc"


def test_a_chat_template_may_have_a_file_of_its_own(llada: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((llada / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode_chat(HELLO) == tokenizer.encode(" hello !")


def test_of_several_named_templates_the_default_one_is_taken(tmp_path: Path) -> None:
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    found = read_chat_template(tmp_path)
    assert found is not None
    assert found.render(HELLO) == "plain"


def test_the_embedded_model_has_a_template() -> None:
    tokenizer = load_tokenizer(embedded_directory())
    ids = tokenizer.encode_chat(HELLO)
    assert (ids[0], ids.count(256)) == (256, 1)
    assert tokenizer.decode(ids) == "user\n\nhelloassistant\n\n"


def test_rendering_equals_that_of_transformers(llada: Path, dream: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(str(llada))
    messages = [{"role": "user", "content": "  hé <b> \n"}, {"role": "assistant", "content": "{{ 1 }}"}]
    for directory in (llada, dream):
        ours = read_chat_template(directory)
        assert ours is not None
        wanted = theirs.apply_chat_template(
            messages, chat_template=ours.source, tokenize=False, add_generation_prompt=True
        )
        assert ours.render([Message(**message) for message in messages]) == wanted


def test_without_a_template_a_chat_is_refused_in_one_line(llada: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((llada / "tokenizer.json").read_bytes())
    with pytest.raises(ModelError, match=r"no chat template in .*; send plain text or token ids instead"):
        load_tokenizer(tmp_path).encode_chat(HELLO)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("{{ raise_exception('system turns are not for me') }}", "refused the messages: system turns are not for me"),
        ("{% for %}", "refused the messages: Expected"),
        ("{{ messages[9].content }}", "refused the messages: .* has no element 9"),
        ("{{ 1 / 0 }}", "failed: division by zero"),
        ("{{ ''.__class__.__mro__ }}", "refused the messages: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "refused the messages: .*append"),
        ("{% include '/etc/passwd' %}", "failed: no loader for this environment"),
    ],
)
def test_a_template_that_cannot_or_may_not_is_one_line_naming_its_file(source: str, line: str) -> None:
    with pytest.raises(ModelError, match=rf"^here\.jinja: the chat template {line}"):
        template(source).render(HELLO)


def test_templates_may_write_json_and_break_out_of_loops() -> None:
    source = "{% for message in messages %}{{ message | tojson }}{% break %}{% endfor %}"
    assert json.loads(template(source).render([Message("user", "é<"), Message("user", "b")])) == {
        "role": "user",
        "content": "é<",
    }


def test_a_template_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": 3}')
    with pytest.raises(ModelError, match="chat_template is a int, wanted text"):
        read_chat_template(tmp_path)


def test_a_list_of_templates_without_names_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": ["{{ messages }}"]}')
    with pytest.raises(ModelError, match="chat_template lists a str, wanted objects with a name"):
        read_chat_template(tmp_path)


def test_an_unknown_kind_of_vocabulary_is_refused_with_the_known_ones(dream: Path, tmp_path: Path) -> None:
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_bytes((dream / name).read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    with pytest.raises(ModelError, match=r"unknown tokenizer_class 'GPT2Tokenizer'.*known: DreamTokenizer, Qwen2Tok"):
        load_tokenizer(tmp_path)


def test_added_tokens_must_get_the_ids_that_the_checkpoint_says(dream: Path, tmp_path: Path) -> None:
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_bytes((dream / name).read_bytes())
    decoder = {"999": {"content": "<|im_end|>", "special": True}}
    config = {"tokenizer_class": "DreamTokenizer", "added_tokens_decoder": decoder}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"<\|im_end\|> has id 999, vocab\.json makes it 261"):
        load_tokenizer(tmp_path)


def test_broken_merges_are_one_line(dream: Path, tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("[]")
    (tmp_path / "merges.txt").write_text("a\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "DreamTokenizer"}')
    with pytest.raises(ModelError, match=r"vocab\.json and merges\.txt are not a tokenizer"):
        load_tokenizer(tmp_path)
