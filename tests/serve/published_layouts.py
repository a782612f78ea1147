"""Directories with the files of GSAI-ML/LLaDA-8B-Instruct and Dream-org/Dream-v0-Instruct-7B, but small.

Names of files, keys, tensors and special tokens are the published ones; sizes, ids and weights are not. The Python
files that come with such checkpoints stop the program that runs them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tests.serve.checkpoints import TINY, TINY_DREAM, tiny_dream_tensors, tiny_tensors, write_checkpoint

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
"""The 256 characters that stand for bytes."""
MERGES = (("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "t"))
FIRST_SPECIAL = len(ALPHABET) + len(MERGES)
VOCABULARY = 288
"""A few rows more than the tokenizer knows, as the published ones have."""

LLADA_SPECIAL = (
    "<|startoftext|>",
    "<|endoftext|>",
    "[CLS]",
    "[gMASK]",
    "<|mdm_mask|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)
DREAM_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|beginoftext|>", "<|mask|>")
NOT_SPECIAL = "<tool_call>"
"""An added token of Dream's that is text."""

LLADA_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first %}{{ bos_token }}{% endif %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
DREAM_TEMPLATE = (
    "{%- if tools %}{{ raise_exception('no tools here') }}{%- endif %}"
    "{%- if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe helpful.<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)


def ids_of(names: Sequence[str]) -> dict[str, int]:
    return {name: FIRST_SPECIAL + place for place, name in enumerate(names)}


LLADA_IDS = ids_of(LLADA_SPECIAL)
DREAM_IDS = ids_of((*DREAM_SPECIAL, NOT_SPECIAL))


def vocabulary() -> dict[str, int]:
    return {text: number for number, text in enumerate([*ALPHABET, *("".join(merge) for merge in MERGES)])}


def write_llada(directory: Path) -> Path:
    """LLaDA: tokenizer.json, and the chat template in tokenizer_config.json."""
    ids = LLADA_IDS
    config = {
        **TINY,
        "architectures": ["LLaDAModelLM"],
        "auto_map": {"AutoConfig": "configuration_llada.LLaDAConfig", "AutoModel": "modeling_llada.LLaDAModelLM"},
        "alibi": False,
        "attention_layer_norm": False,
        "embedding_size": VOCABULARY,
        "eos_token_id": ids["<|endoftext|>"],
        "flash_attention": False,
        "include_qkv_bias": False,
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "mask_token_id": ids["<|mdm_mask|>"],
        "mlp_ratio": 4,
        "model_type": "llada",
        "pad_token_id": ids["<|endoftext|>"],
        "rope": True,
        "rope_full_precision": True,
        "scale_logits": False,
        "torch_dtype": "bfloat16",
        "vocab_size": VOCABULARY,
    }
    write_checkpoint(directory, tiny_tensors(vocabulary=VOCABULARY), num_shards=6, config=config)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary(), merges=list(MERGES)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(LLADA_SPECIAL))
    backend.save(str(directory / "tokenizer.json"))
    _write_tokenizer_config(
        directory, ids, tokenizer_class="PreTrainedTokenizerFast", chat_template=LLADA_TEMPLATE, bos="<|startoftext|>"
    )
    _write_code(directory, "configuration_llada.py", "modeling_llada.py")
    return directory


def write_dream(directory: Path) -> Path:
    """Dream: vocab.json, merges.txt and added_tokens.json, no tokenizer.json."""
    ids = DREAM_IDS
    config = {
        **TINY_DREAM,
        "auto_map": {"AutoConfig": "configuration_dream.DreamConfig", "AutoModel": "modeling_dream.DreamModel"},
        "attention_dropout": 0.0,
        "bos_token_id": ids["<|beginoftext|>"],
        "eos_token_id": ids["<|endoftext|>"],
        "mask_token_id": ids["<|mask|>"],
        "max_window_layers": 28,
        "model_type": "Dream",
        "pad_token_id": ids["<|endoftext|>"],
        "rope_scaling": None,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": VOCABULARY,
    }
    write_checkpoint(directory, tiny_dream_tensors(vocabulary=VOCABULARY), num_shards=4, config=config)
    (directory / "vocab.json").write_text(json.dumps(vocabulary(), ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(merge) for merge in MERGES)]
    (directory / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (directory / "added_tokens.json").write_text(json.dumps(ids))
    _write_tokenizer_config(
        directory, ids, tokenizer_class="DreamTokenizer", chat_template=DREAM_TEMPLATE, bos="<|beginoftext|>"
    )
    _write_code(directory, "configuration_dream.py", "modeling_dream.py", "tokenization_dream.py")
    return directory


def _write_tokenizer_config(
    directory: Path, ids: Mapping[str, int], *, tokenizer_class: str, chat_template: str, bos: str
) -> None:
    decoder = {
        str(number): {"content": text, "lstrip": False, "normalized": False, "special": text != NOT_SPECIAL}
        for text, number in ids.items()
    }
    config = {
        "added_tokens_decoder": decoder,
        "bos_token": bos,
        "chat_template": chat_template,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|endoftext|>",
        "model_max_length": 131072,
        "pad_token": {"__type": "AddedToken", "content": "<|endoftext|>", "special": True},
        "tokenizer_class": tokenizer_class,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "special_tokens_map.json").write_text(json.dumps({"bos_token": bos, "eos_token": "<|endoftext|>"}))
    (directory / "generation_config.json").write_text(json.dumps({"_from_model_config": True}))


def _write_code(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).write_text('raise SystemExit("code that came with a checkpoint was run")\n')
