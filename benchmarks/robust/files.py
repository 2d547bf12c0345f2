"""Checkpoints, specs and captures that lie, break off or bomb."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from parity_audit.cache.root import cache_root
from parity_audit.specs import miniature
from parity_audit.specs.resolve import resolve_model
from robust.case import Case

LLAMA = "meta-llama/Llama-3.2-1B"
DEEP = "[" * 100_000
CONFIG_TEXTS = {
    "empty": "", "not JSON": "{", "a list": "[]", "a number": "3", "null": "null", "a string": '"x"', "deep": DEEP,
    "deep object": '{"a":' * 100_000, "binary": "\x00\x01", "long integer": '{"vocab_size": ' + "9" * 10_000 + "}",
    "17 MiB": '{"a": "' + "x" * (17 << 20) + '"}', "empty object": "{}",
}  # fmt: skip
CONFIG_KEYS: list[tuple[str, Any, str]] = [  # key, value, error code; Ellipsis takes the key away, and the default of transformers then says another size
    ("architectures", ..., "bad-config"), ("architectures", [], "bad-config"), ("architectures", "LlamaForCausalLM", "bad-config"),
    ("architectures", [3], "bad-config"), ("architectures", {}, "bad-config"), ("architectures", ["Nothing"], "unknown-architecture"),
    ("hidden_size", ..., "missing-tensors"), ("hidden_size", "128", "bad-config"), ("hidden_size", 0, "bad-config"),
    ("hidden_size", -128, "bad-config"), ("hidden_size", 1.5, "bad-config"), ("hidden_size", 10**12, "bad-config"),
    ("hidden_size", None, "bad-config"), ("hidden_size", [128], "bad-config"), ("hidden_size", True, "bad-config"),
    ("hidden_size", float("nan"), "bad-config"), ("hidden_size", float("inf"), "bad-config"),
    ("num_hidden_layers", ..., "missing-tensors"), ("num_hidden_layers", 10**9, "bad-config"), ("num_hidden_layers", 0, "bad-config"),
    ("num_hidden_layers", "four", "bad-config"), ("num_attention_heads", 0, "bad-config"), ("num_attention_heads", ..., "missing-tensors"),
    ("num_key_value_heads", -1, "bad-config"), ("num_key_value_heads", {}, "bad-config"), ("head_dim", "big", "bad-config"),
    ("head_dim", 10**10, "bad-config"), ("intermediate_size", ..., "missing-tensors"), ("intermediate_size", 1e300, "bad-config"),
    ("vocab_size", ..., "missing-tensors"), ("vocab_size", 0, "bad-config"), ("vocab_size", 10**11, "bad-config"),
    ("vocab_size", "many", "bad-config"), ("bos_token_id", 10**9, "bad-config"), ("bos_token_id", -1, "bad-config"),
    ("bos_token_id", "x", "bad-config"), ("bos_token_id", [1], "bad-config"), ("rope_parameters", 3, "bad-config"),
    ("rms_norm_eps", "1e-5", "bad-config"), ("rms_norm_eps", float("nan"), "bad-config"), ("rms_norm_eps", [], "bad-config"),
    ("rope_theta", "x", "bad-config"), ("rope_theta", float("inf"), "bad-config"), ("rope_theta", {}, "bad-config"),
    ("rope_scaling", "linear", "bad-config"), ("rope_scaling", [1], "bad-config"), ("rope_scaling", 3, "bad-config"),
    ("max_position_embeddings", "long", "bad-config"), ("max_position_embeddings", -5, "bad-config"),
    ("max_position_embeddings", 10**15, "bad-config"), ("sliding_window", 10**12, "bad-config"), ("sliding_window", "wide", "bad-config"),
]  # fmt: skip


def header(text: bytes, length: int | None = None, body: bytes = b"") -> bytes:
    """A file in the safetensors format, whatever its header says."""
    return (len(text) if length is None else length).to_bytes(8, "little") + text + body


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8), **more: Any) -> bytes:
    """A header with one tensor."""
    return json.dumps({"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}}).encode()


def pair(first: tuple[int, int], second: tuple[int, int]) -> bytes:
    """A header with two tensors of two numbers."""
    one = {"dtype": "F32", "shape": [2]}
    return json.dumps({"a": {**one, "data_offsets": first}, "b": {**one, "data_offsets": second}}).encode()


EIGHT = b"\0" * 8
HEADERS = {
    "empty file": b"", "three bytes": b"abc", "only a length": (10).to_bytes(8, "little"), "length beyond the file": header(b"{}", 1000),
    "huge length": header(b"{}", 1 << 62), "length of all ones": header(b"{}", (1 << 64) - 1), "not JSON": header(b"{not"),
    "a list": header(b"[]"), "a number": header(b"3"), "deep": header(DEEP.encode()), "not UTF-8": header(b'{"\xff\xfe": 1}'),
    "entry is a number": header(b'{"x": 3}'), "entry is a list": header(b'{"x": []}'), "entry is empty": header(b'{"x": {}}'),
    "dtype missing": header(b'{"x": {"shape": [2], "data_offsets": [0, 8]}}', body=EIGHT), "dtype unknown": header(entry("F33"), body=EIGHT),
    "dtype a number": header(entry(32), body=EIGHT), "dtype a list": header(entry(["F32"]), body=EIGHT),
    "wrong dtype size": header(entry("F64"), body=EIGHT),
    "shape negative": header(entry(shape=[-2]), body=EIGHT), "shape a fraction": header(entry(shape=[2.0]), body=EIGHT),
    "shape a number": header(entry(shape=2), body=EIGHT), "shape too large": header(entry(shape=[1 << 61, 8]), body=EIGHT),
    "shape of truth": header(entry(shape=[True, 2]), body=EIGHT), "offsets reversed": header(entry(offsets=(8, 0)), body=EIGHT),
    "offsets negative": header(entry(offsets=(-8, 0)), body=EIGHT), "one offset": header(entry(offsets=(8,)), body=EIGHT),
    "three offsets": header(entry(offsets=(0, 4, 8)), body=EIGHT), "offsets are text": header(entry(offsets="08"), body=EIGHT),
    "offsets beyond the file": header(entry(shape=[200], offsets=(0, 800)), body=EIGHT), "first byte left out": header(entry(offsets=(8, 16)), body=EIGHT * 2),
    "overlapping": header(pair((0, 8), (4, 12)), body=b"\0" * 12), "the same bytes": header(pair((0, 8), (0, 8)), body=EIGHT),
    "hole": header(pair((0, 8), (12, 20)), body=b"\0" * 20), "bytes left over": header(entry(), body=EIGHT * 2),
    "truncated": header(entry(), body=b"\0" * 4), "name twice": header(b'{"x":1,' + entry()[1:], body=EIGHT), "extra key": header(entry(more=1), body=EIGHT),
}  # fmt: skip

SPECS = {  # content of a spec: error code
    "empty": ("", "spec-yaml"), "a list": ("[1]", "spec-yaml"), "a number": ("3", "spec-yaml"), "tab": ("\ta: 1", "spec-yaml"),
    "unclosed": ("architecture: [a", "spec-yaml"), "key twice": ("architecture: a\narchitecture: b\n", "spec-yaml"),
    "python tag": ("architecture: !!python/object/apply:os.system [id]\n", "spec-value"), "deep": ("a: " + "[" * 20_000, "spec-yaml"),
    "deep mapping": ("".join(" " * i + f"a{i}:\n" for i in range(600)), "spec-yaml"), "too large": ("# " + "x" * (300 << 10) + "\na: 1\n", "spec-yaml"),
    "binary": ("\x00\x01", "spec-yaml"), "no date": ("architecture: 2001-99-99\n", "spec-yaml"),
    "bomb": ("a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)), "spec-yaml"),
    "bomb of mappings": ("a0: &a0 {k: x}\n" + "".join(f"a{i}: &a{i} {{p: *a{i - 1}, q: *a{i - 1}, r: *a{i - 1}}}\n" for i in range(1, 30)), "spec-yaml"),
    "holds itself": ("architecture: X\nsources: &a [*a]\n", "spec-value"), "alias of nothing": ("a: *b\n", "spec-yaml"),
    "unknown key": ("architecture: X\nknbos: {}\n", "spec-unknown-key"), "number for a map": ("architecture: X\nknobs: 3\n", "spec-value"),
    "no architecture": ("knobs: {}\n", "spec-value"), "extends nothing": ("architecture: X\nextends: nothing_at_all\n", "spec-extends"),
    "extends itself": ("architecture: X\nextends: spec\n", "spec-extends"), "extends a path": ("architecture: X\nextends: ../../etc/passwd\n", "spec-extends"),
    "huge power": ("9**9**9**9", "spec-expression"), "huge product": ("*".join(["10"] * 160), "spec-expression"), "repeated text": ("'a' * 10**9", "spec-expression"),
    "deep expression": ("(" * 300 + "1" + ")" * 300, "spec-expression"), "many minus signs": ("-" * 499 + "1", "spec-expression"),
    "long expression": ("1+" * 5000 + "1", "spec-expression"), "import": ("__import__('os')", "spec-expression"), "attribute": ("config.__class__", "spec-expression"),
    "comprehension": ("[x for x in config]", "spec-expression"), "lambda": ("(lambda: 1)()", "spec-expression"), "division by 0": ("1 // 0", "spec-expression"),
    "overflow": ("1e308 * 10 ** 70 // 1", "spec-expression"), "text for a number": ("'a' + 1", "spec-expression"),
}  # fmt: skip


def cases() -> Iterator[Case]:
    """All of them."""
    for name, text in CONFIG_TEXTS.items():
        yield Case(group="config.json", name=name, args=_config(lambda _, text=text: text), exit=2, says="bad-config")
    for key, value, says in CONFIG_KEYS:
        shown = "missing" if value is ... else json.dumps(value)
        code = 2 if says in ("bad-config", "unknown-architecture") else 3
        yield Case(
            group="config.json", name=f"{key}: {shown}", args=_config(_changed(key, value)), exit=code, says=says
        )
    for name, content in HEADERS.items():
        yield Case(
            group="safetensors", name=name, args=_weights({"model.safetensors": content}), exit=3, says="bad-weights"
        )
    yield from _checkpoints()
    for name, (text, says) in SPECS.items():
        yield Case(group="spec", name=name, args=_spec(text, says), exit=2, says=says)


def _source() -> Path:
    return Path(miniature.make(resolve_model(LLAMA), root=cache_root() / "synthetic").path)


def _config(change: Callable[[dict[str, Any]], str]):  # type: ignore[no-untyped-def]
    def args(folder: Path) -> list[str]:
        source = _source()
        os.symlink(source / "model.safetensors", folder / "model.safetensors")
        (folder / "config.json").write_text(change(json.loads((source / "config.json").read_text())))
        return [LLAMA, "--weights", str(folder), "-c", "hf", "--out", str(folder / "out")]

    return args


def _changed(key: str, value: Any) -> Callable[[dict[str, Any]], str]:
    def change(config: dict[str, Any]) -> str:
        rest = {name: item for name, item in config.items() if name != key}
        return json.dumps(rest if value is ... else {**rest, key: value})

    return change


def _weights(files: dict[str, bytes]):  # type: ignore[no-untyped-def]
    def args(folder: Path) -> list[str]:
        (folder / "config.json").write_text((_source() / "config.json").read_text())
        for name, content in files.items():
            (folder / name).write_bytes(content)
        return [str(folder), "-c", "hf", "--out", str(folder / "out")]

    return args


def _checkpoints() -> Iterator[Case]:
    """Whole checkpoints with one thing wrong; all of them are seen before an engine starts."""
    index = "model.safetensors.index.json"
    changes: dict[str, tuple[str, Callable[[Path], None]]] = {
        "no weights": ("missing-weights", lambda folder: (folder / "model.safetensors").unlink()),
        "only a pickle": ("missing-weights", lambda folder: os.rename(folder / "model.safetensors", folder / "model.bin")),
        "weights are a directory": ("bad-weights", _directory),
        "the same tensors twice": ("bad-weights", lambda folder: (folder / "z.safetensors").write_bytes((folder / "model.safetensors").read_bytes())),
        "NaN in a norm": ("non-finite-weights", lambda folder: _poison(folder, "model.norm.weight", float("nan"))),
        "infinity in the embedding": ("non-finite-weights", lambda folder: _poison(folder, "model.embed_tokens.weight", float("inf"))),
        "index is no JSON": ("bad-weights", lambda folder: _index(folder, index, "{")), "index is a list": ("bad-weights", lambda folder: _index(folder, index, "[]")),
        "index without a map": ("bad-weights", lambda folder: _index(folder, index, "{}")), "index maps to a number": ("bad-weights", lambda folder: _index(folder, index, '{"weight_map": 3}')),
        "index is deep": ("bad-weights", lambda folder: _index(folder, index, DEEP)),
        "index names a lost file": ("missing-tensors", lambda folder: _index(folder, index, '{"weight_map": {"lost": "model-2.safetensors"}}')),
    }  # fmt: skip
    for name, (says, change) in changes.items():
        yield Case(group="checkpoint", name=name, args=_checkpoint(change), exit=3, says=says)


def _checkpoint(change: Callable[[Path], None]):  # type: ignore[no-untyped-def]
    def args(folder: Path) -> list[str]:
        for name in ("config.json", "model.safetensors"):
            (folder / name).write_bytes((_source() / name).read_bytes())
        change(folder)
        return [str(folder), "-c", "hf", "--out", str(folder / "out")]

    return args


def _directory(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()


def _index(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)


def _poison(folder: Path, name: str, value: float) -> None:
    path = folder / "model.safetensors"
    tensors = {key: tensor.clone() for key, tensor in load_file(path).items()}
    tensors[name].view(-1)[torch.numel(tensors[name]) // 2] = value
    save_file(tensors, path)


def _spec(text: str, says: str):  # type: ignore[no-untyped-def]
    """`spec check` of a file; an expression stands in a spec that is right otherwise."""

    def args(folder: Path) -> list[str]:
        path = folder / "spec.yaml"
        path.write_text(EXPRESSION.format(json.dumps(text)) if says == "spec-expression" else text)
        return ["spec", "check", str(path), "-b", "hf", "-q"]

    return args


EXPRESSION = """architecture: LlamaForCausalLM
extends: llama_like
models: {{x/y: {{config: {{architectures: [LlamaForCausalLM], model_type: llama, vocab_size: 100, hidden_size: 8}}}}}}
dims: {{d_model: {0}}}
"""
