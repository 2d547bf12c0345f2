"""Make a tiny but real tokenizer: byte-level BPE trained on one paragraph, with the special ids that a miniature's config names.

Its JSON is adapted by hand to the form that every release since tokenizers 0.15 reads.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>")
PAD, EOS, BOS, UNK = range(len(SPECIAL))
TEXT = """The quick brown fox jumps over 13 lazy dogs while the model reads its own residual stream.
A port is right when every layer of it computes what the reference computes, up to rounding, for every
token, every position and every batch. A wrong constant hides where tests do not look: past the window,
behind the padding, under the soft-cap. Measure the floor first, then measure the distance, then speak."""


def write_tokenizer(folder: Path, d_vocab: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json for a vocabulary of at most `d_vocab` tokens."""
    tokenizer = Tokenizer(models.BPE(unk_token=SPECIAL[UNK]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=d_vocab, special_tokens=list(SPECIAL), initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator([TEXT], trainer)
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    merges = content["model"]["merges"]
    content["model"]["merges"] = [" ".join(pair) if isinstance(pair, list) else pair for pair in merges]
    content["post_processor"] = _adds_bos()
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False))
    tokens = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
    settings = {**tokens, "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").write_text(json.dumps(tokens))


def _adds_bos() -> dict[str, Any]:
    bos = {"SpecialToken": {"id": "<bos>", "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [bos, first],
        "pair": [bos, first, second],
        "special_tokens": {"<bos>": {"id": "<bos>", "ids": [BOS], "tokens": ["<bos>"]}},
    }
