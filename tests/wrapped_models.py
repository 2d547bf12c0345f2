"""Checkpoints of models of images and text around a miniature, as transformers saves them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from parity_audit.core.types import Checkpoint

SIGHT = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14
}  # fmt: skip
OF_3N = {"vocab_size": 4, "vocab_offset": 515}
"""What sees and hears in a Gemma 3n has embeddings of its own, numbered behind the 515 tokens of the miniature."""
KINDS = {
    "gemma3n": (
        partial(
            transformers.Gemma3nConfig,
            audio_config=transformers.Gemma3nAudioConfig(
                hidden_size=32, conf_num_hidden_layers=1, conf_num_attention_heads=2, **OF_3N
            ),
            image_token_id=514,
            audio_token_id=513,
        ),
        lambda **_: transformers.Gemma3nVisionConfig(architecture="test_efficientnet", hidden_size=32, **OF_3N),
        {},
    ),
    "gemma3": (
        transformers.Gemma3Config,
        partial(transformers.SiglipVisionConfig, vision_use_head=False),
        {"mm_tokens_per_image": 4},
    ),
    "llava": (transformers.LlavaConfig, transformers.CLIPVisionConfig, {}),
}


def network(kind: str, text: Checkpoint) -> Any:
    """A model of this kind whose text model is the miniature; what sees images is drawn at random."""
    inside = transformers.AutoModelForCausalLM.from_pretrained(text.path)
    of_all, of_sight, more = KINDS[kind]
    tied = inside.config.tie_word_embeddings
    config = of_all(text_config=inside.config, vision_config=of_sight(**SIGHT), tie_word_embeddings=tied, **more)
    torch.manual_seed(0)
    made = transformers.AutoModelForImageTextToText.from_config(config)
    made.model.language_model.load_state_dict(inside.model.state_dict())
    made.lm_head.load_state_dict(inside.lm_head.state_dict())
    return made.eval()


LATER = {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head."}
"""Names of live modules of transformers since 4.52, which other kinds are stored under."""
RELEASED = {"vision_tower.": "vision_tower.vision_model."}
"""Names that Gemma 3 was released with, where transformers 5.19 writes others."""


def save(kind: str, text: Checkpoint, folder: Path, *, names: Mapping[str, str] = MappingProxyType({})) -> Path:
    """Its checkpoint, with the tokenizer of the miniature.

    Args:
        names: other beginnings of the names of tensors, by those that transformers writes.
    """
    network(kind, text).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(text.path).save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file(
        {_renamed(name, names): value for name, value in load_file(file).items()}, file, metadata={"format": "pt"}
    )
    return folder


def _renamed(name: str, names: Mapping[str, str]) -> str:
    return next((other + name.removeprefix(own) for own, other in names.items() if name.startswith(own)), name)
