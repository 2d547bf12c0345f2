"""Write a patch as Python code that can be pasted into a script for the backend's release."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from parity_audit.core.text_names import in_whole
from parity_audit.core.types import EVERY, MAY_BE_MISSING, Edit

ROTARY_CODE = """\
{tables}
{loop}angles = torch.arange({attn}.rotary_sin.shape[0], dtype=torch.float64)[:, None] * inv_freq
{indent}angles = {spread}
{indent}{attn}.rotary_sin = (angles.sin() * {factor}).to({attn}.rotary_sin)
{indent}{attn}.rotary_cos = (angles.cos() * {factor}).to({attn}.rotary_cos)"""

WINDOWS_CODE = """\
for block, window in zip(model.{modules}, {windows}):
    mask = torch.ones_like({target}).tril()
    {target} = mask if window is None else mask.triu(1 - window)"""


TF32_CODE = {
    "torch": """\
import torch
torch.backends.cuda.matmul.allow_tf32 = False
torch.backends.cudnn.allow_tf32 = False
torch.set_float32_matmul_precision("highest")""",
    "vllm": """\
import os  # before vllm is imported
os.environ |= {"VLLM_FLOAT32_MATMUL_PRECISION": "highest", "TRITON_F32_DEFAULT": "ieee"}""",
}

NO_PATHS: Mapping[str, str] = MappingProxyType({})
OF_LOADER = ("attn_implementation", "device_map", "max_memory")
"""Settings of `hf` that are arguments of transformers' loader and not keys of a config."""
INSIDE = {"nnsight": "model = traced._module  # the module that nnsight wraps"}
"""The line by which live edits reach the wrapped module, for backends whose users hold a wrapper."""


def render(edits: Sequence[Edit], backend_key: str, text_paths: Mapping[str, str] = NO_PATHS) -> str:
    """Return code with the same effect as the edits.

    In the code `model` is the loaded model, `traced` nnsight's model, `llm` the vLLM engine.

    Args:
        text_paths: where the text model is in the loaded model, see `core.types.Description`.
    """
    edits = [replace(edit, path=in_whole(edit.path, text_paths)) if edit.path else edit for edit in edits]
    loads = [edit for edit in edits if edit.op == "load"]
    live = [edit for edit in edits if edit.op != "load"]
    lines = [_load_code(edit.value, backend_key, wrapped=bool(text_paths)) for edit in loads]
    lines += [LIVE.get(edit.op, _set_code)(edit) for edit in live]
    if live and backend_key in INSIDE:
        lines.insert(len(loads), INSIDE[backend_key])
    if any(edit.op in LIVE for edit in live):
        lines.insert(0, "import torch")
    return "\n".join(lines)


def _load_code(settings: dict[str, Any], backend_key: str, *, wrapped: bool) -> str:
    own = {key: value for key, value in settings.items() if key != "tf32"}
    lines = [] if "tf32" not in settings else [TF32_CODE["vllm" if backend_key == "vllm" else "torch"]]
    code = _config_code(own) if wrapped and backend_key == "hf" else [_call_code(own, backend_key)]
    return "\n".join([*lines, *code] if own else lines)


def _config_code(settings: dict[str, Any]) -> list[str]:
    """Return code that sets settings in the text model's own config.

    It is used for models with other modalities besides text, because their loader takes no settings for the text model.
    """
    own = {key: value for key, value in settings.items() if key not in OF_LOADER}
    given = {key: value for key, value in settings.items() if key in OF_LOADER}
    lines = ["config = AutoConfig.from_pretrained(name)"]
    lines += [f"config.get_text_config().{key} = {_literal(value)}" for key, value in own.items()]
    return [*lines, _call_code(given, "hf").replace("name, ", "name, config=config, ").replace(", )", ")")]


def _call_code(settings: dict[str, Any], backend_key: str) -> str:
    given = ", ".join(f"{key}={_literal(value)}" for key, value in settings.items())
    call = {
        "hf": "model = AutoModelForCausalLM.from_pretrained(name, {given})",
        "hooked_transformer": "model = HookedTransformer.from_pretrained_no_processing(name, {given})",
        "transformer_bridge": "model = TransformerBridge.boot_transformers(name, {given})",
        "nnsight": 'traced = TransformersModel(name, task="text-generation", dispatch=True, {given})',
        "vllm": "llm = LLM(model=name, {given})",
        "sglang": "engine = sglang.Engine(model_path=name, {given})",
    }[backend_key]
    return call.format(given=given)


def _set_code(edit: Edit) -> str:
    if isinstance(edit.value, list) and EVERY in edit.path:
        loop, target = _zipped(edit.path, "value", _literal(edit.value))
        return f"{loop}{target} = value"
    loop, target = _loop(edit.path)
    return f"{loop}{target} = {_literal(edit.value)}"


def _rotary_code(edit: Edit) -> str:
    """Return code that replaces rotary tables: one table for all modules, or one per module."""
    each = edit.value if isinstance(edit.value, list) else [edit.value]
    loop, attn = _loop(edit.path)
    tables = f"inv_freq = {_tensor(each[0])}"
    if len(each) > 1:
        tables = "\n".join(["tables = [", *(f"    {_tensor(table)}," for table in each), "]"])
        loop, attn = _zipped(edit.path, "inv_freq", "tables")
    adjacent = each[0].get("pairing", "half") == "adjacent"
    return ROTARY_CODE.format(
        tables=tables, loop=loop, attn=attn, indent=_indent(loop),
        spread="angles.repeat_interleave(2, dim=1)" if adjacent else "angles.repeat(1, 2)",
        factor=each[0].get("attention_factor", 1.0),
    )  # fmt: skip


def _tensor(table: dict[str, Any]) -> str:
    return f"torch.tensor({table['inv_freq']}, dtype=torch.float64)"


def _windows_code(edit: Edit) -> str:
    head, _, tail = edit.path.partition(EVERY)
    return WINDOWS_CODE.format(windows=edit.value, modules=head, target=f"block{tail}")


def _add_code(edit: Edit) -> str:
    loop, target = _loop(edit.path)
    return f"{loop}{target}.data += {_literal(edit.value)}"


def _activation_code(edit: Edit) -> str:
    loop, target = _loop(edit.path)
    return f"from transformers.activations import ACT2FN\n{loop}{target} = ACT2FN[{_literal(edit.value)}]"


def _scale_code(edit: Edit) -> str:
    loop, target = _loop(edit.path)
    return f"{loop}{target}.register_forward_hook(lambda module, args, output: output * {_literal(edit.value)})"


def _knob_code(edit: Edit) -> str:
    """Return a comment with the `-c` argument that sets the knob, because a knob of the backend `spec` is one of its settings."""
    return f"# -c 'spec,{edit.path}={json.dumps(edit.value)}'"


LIVE = {
    "knob": _knob_code,
    "rotary_tables": _rotary_code,
    "causal_windows": _windows_code,
    "add": _add_code,
    "scale_output": _scale_code,
    "activation": _activation_code,
}


def _loop(path: str) -> tuple[str, str]:
    """Return the `for` statement for a path like `blocks[*].attn.x`, and the target inside it.

    If the path marks a part that some objects lack, the code tests for it first.
    """
    head, star, tail = path.partition(EVERY)
    name = head.rstrip("s").rpartition(".")[2] or "part"
    name = name if name != head else "part"
    loop, target = (f"for {name} in model.{head}:\n    ", f"{name}{tail}") if star else ("", f"model.{path}")
    has, target = _may_be_missing(target)
    return (f"{loop}if {has}:\n{_indent(loop)}    " if has else loop), target


def _zipped(path: str, name: str, values: str) -> tuple[str, str]:
    """Return a `for` statement over the modules that have the target together with one value each, and the target inside it."""
    head, _, tail = path.partition(EVERY)
    has, target = _may_be_missing(f"block{tail}")
    blocks = f"[block for block in model.{head} if {has}]" if has else f"model.{head}"
    return f"for block, {name} in zip({blocks}, {values}):\n    ", target


def _may_be_missing(target: str) -> tuple[str, str]:
    """Return the test for the part of a target that an object may lack (empty if no part is marked), and the plain target."""
    owner, mark, rest = target.partition(MAY_BE_MISSING)
    holder, _, name = owner.rpartition(".")
    return (f"hasattr({holder}, {_literal(name)})" if mark else ""), owner + rest


def _indent(loop: str) -> str:
    """Return the indentation of the lines inside a statement."""
    return loop.rpartition("\n")[2]


def _literal(value: Any) -> str:
    """Return the Python source of plain data."""
    return json.dumps(value) if isinstance(value, str) else repr(value)
