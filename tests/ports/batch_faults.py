# parity-audit: transformers may be imported before this file
"""Ports whose answer depends on the conditions of the run: `python:batch_faults.py:load,fault=NAME`, or `clean`."""

from __future__ import annotations

from functools import wraps

import torch
import transformers

LEAK = 1e-3
ROUNDED = 64


def load(model_path: str, dtype: str, device: str, fault: str = "clean"):
    """A transformers model, with one planted fault in what surrounds its modules."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_path, torch_dtype=getattr(torch, dtype), attn_implementation="eager"
    ).eval()
    FAULTS[fault](model)
    return model


def clean(model) -> None:
    """A clean port."""


def left_padding_is_attended_to(model) -> None:
    """A mask that covers padding on the right only: rows padded on the left read their own padding."""
    original = model.forward

    @wraps(original)
    def forward(input_ids=None, attention_mask=None, **more):
        if attention_mask is not None and not bool(attention_mask[:, 0].all()):
            attention_mask = torch.ones_like(attention_mask)
        return original(input_ids=input_ids, attention_mask=attention_mask, **more)

    model.forward = forward


def rows_leak(model) -> None:
    """Every row of a batch gets a thousandth of the next one's embeddings."""

    def leak(module, args, output):
        return output + LEAK * output.roll(1, 0) if len(output) > 1 else output

    model.get_input_embeddings().register_forward_hook(leak)


def stale_cache(model) -> None:
    """From the second step on the cache of layer 1 returns the keys of position 2 where those of position 3 belong."""
    original = model.forward

    @wraps(original)
    def forward(input_ids=None, past_key_values=None, **more):
        if past_key_values is not None and past_key_values.get_seq_length() > 3:
            keys = past_key_values.layers[1].keys
            past_key_values.layers[1].keys = torch.cat([keys[:, :, :3], keys[:, :, 2:3], keys[:, :, 4:]], 2)
        return original(input_ids=input_ids, past_key_values=past_key_values, **more)

    model.forward = forward


def chunk_starts_early(model) -> None:
    """A chunk of several tokens behind a cache is given positions that start one too early; single tokens are right."""
    original = model.forward

    @wraps(original)
    def forward(input_ids=None, past_key_values=None, position_ids=None, **more):
        done = 0 if past_key_values is None else past_key_values.get_seq_length()
        if done and input_ids.shape[1] > 1:
            position_ids = torch.arange(done - 1, done - 1 + input_ids.shape[1])[None]
        return original(input_ids=input_ids, past_key_values=past_key_values, position_ids=position_ids, **more)

    model.forward = forward


def single_rows_round(model) -> None:
    """A step of one token has other last bits: the final norm is off by some units in the last place, in a fixed pattern."""

    def round_off(module, args, output):
        if output.shape[1] > 1:
            return output
        signs = torch.arange(output.shape[-1]) % 2 * 2 - 1
        return output * (1 + ROUNDED * torch.finfo(output.dtype).eps * signs)

    model.model.norm.register_forward_hook(round_off)


FAULTS = {
    one.__name__: one
    for one in (clean, left_padding_is_attended_to, rows_leak, stale_cache, chunk_starts_early, single_rows_round)
}
