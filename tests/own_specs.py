"""A spec of somebody's own port, as a text to be completed by the tests of the gate and of `spec check`."""

from __future__ import annotations

LLAMA_PORT = """architecture: {architecture}
extends: llama
models:
  somebody/port:
    config:
      architectures: [{architecture}]
      model_type: llama
      hidden_size: 2048
      intermediate_size: 8192
      num_hidden_layers: 16
      num_attention_heads: 32
      num_key_value_heads: 8
      head_dim: 64
      vocab_size: 128256
      rms_norm_eps: 1.0e-5
      rope_theta: 500000.0
      rope_scaling: null
      max_position_embeddings: 2048
      hidden_act: silu
      tie_word_embeddings: true
      bos_token_id: 0
      eos_token_id: 1
"""
