"""Writes tokenizer.json and tokenizer_config.json of the embedded model: a byte-level tokenizer.

Ids 0..255 are the bytes, then the special tokens in the order of SPECIAL_TOKENS. Run from the repository root:
    python tools/make_embedded_tokenizer.py
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BEGIN, END, MASK = "<|startoftext|>", "<|endoftext|>", "<|mdm_mask|>"
SPECIAL_TOKENS = (
    BEGIN,
    END,
    MASK,
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|reserved_token_0|>",
    "<|reserved_token_1|>",
)
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
DIRECTORY = Path(__file__).parent.parent / "dbench" / "models" / "embedded"


def byte_characters() -> dict[str, int]:
    """Character -> byte, as byte-level tokenizers spell bytes.

    Printable Latin-1 bytes stand for themselves; the others take the code points from 256 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte if byte in printable else 256 + others.index(byte)): byte for byte in range(256)}


def main() -> None:
    tokenizer = Tokenizer(models.BPE(vocab=byte_characters(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(DIRECTORY / "tokenizer.json"))
    config = {
        "bos_token": BEGIN,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "mask_token": MASK,
        "model_max_length": 4096,
        "pad_token": END,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    text = json.dumps(config, indent=2) + "\n"
    (DIRECTORY / "tokenizer_config.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
