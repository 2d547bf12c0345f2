#!/usr/bin/env python3
"""What an audit of models that do not fit here would need, by `parity-audit plan` on their configs.

    python benchmarks/large.py

Sizes are those of the released config.json. Seconds are the operations of reference, judge and one candidate at 1e12 a second.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from parity_audit.capture.estimate import planned_cost

SHARED = {"rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "head_dim": 128}
LLAMA_3_70B = {
    **SHARED, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192, "rope_theta": 500000.0, "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip
QWEN3_480B = {
    **SHARED, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 6144,
    "intermediate_size": 8192, "moe_intermediate_size": 2560, "num_hidden_layers": 62, "num_attention_heads": 96,
    "num_key_value_heads": 8, "num_experts": 160, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936, "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6, "rope_theta": 10000000.0, "attention_bias": False, "use_sliding_window": False,
    "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip
MODELS = {"meta-llama/Meta-Llama-3-70B": LLAMA_3_70B, "Qwen/Qwen3-Coder-480B-A35B-Instruct": QWEN3_480B}
PROBES = {"one probe of 48 tokens": ("short",), "all probes": None}
RANKS = 8
GIB, TERA = 1 << 30, 1e12


def main() -> None:
    """One row per model, dtype and choice of probes."""
    print(
        "| model | dtype | probes | parameters | a token meets | weights, GiB | a rank of 8, GiB | one side's captures, GiB "
        "| reference, judge and candidate on disk, GiB | operations | seconds at 1e12 a second |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, config in MODELS.items():
            place = Path(folder) / name.rpartition("/")[2]
            place.mkdir()
            (place / "config.json").write_text(json.dumps(config))
            for dtype in ("bfloat16", "float32"):
                for said, probes in PROBES.items():
                    print(_row(name, place, dtype, said, probes), flush=True)


def _row(name: str, place: Path, dtype: str, said: str, probes: tuple[str, ...] | None) -> str:
    cost = planned_cost(str(place), weights=None, probes=probes, dtype=dtype)
    side = sum(probe.native_bytes for probe in cost.probes)
    figures = (
        f"{cost.parameters / 1e9:.0f}G", f"{cost.active / 1e9:.0f}G", f"{cost.weight_bytes / GIB:.0f}",
        f"{cost.weight_bytes / RANKS / GIB:.0f}", f"{side / GIB:.1f}", f"{cost.disk_bytes / GIB:.1f}",
        f"{cost.operations:.1e}", f"{cost.operations / TERA:.0f}",
    )  # fmt: skip
    return "| " + " | ".join((f"`{name}`", dtype, said, *figures)) + " |"


if __name__ == "__main__":
    main()
