"""Reversible edits of a live model: write new values, keep the original ones, and put them back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from parity_audit.backends.paths import assign, get, matches
from parity_audit.core.types import Edit, ReadBack

PREVIEW = 8
Op = Callable[[Any, Edit], "list[tuple[str, Any]]"]


def _set(root: Any, edit: Edit) -> list[tuple[str, Any]]:
    """Return concrete (path, new value) pairs of a `set` edit.

    A list with as many elements as `[*]` has matches gives one element to each match. Any other value goes to every match.
    """
    found = list(matches(root, edit.path))
    values = edit.value if isinstance(edit.value, list) and len(edit.value) == len(found) else [edit.value] * len(found)
    return [(path, _like(old, value)) for (path, old), value in zip(found, values, strict=False)]


def _like(old: Any, value: Any) -> Any:
    """Return `value` as a tensor with the shape, dtype and device of `old` if `old` is a tensor, else unchanged.

    A list holds all numbers of the tensor; a single number fills it. A value that is a tensor already is returned unchanged.
    """
    if not isinstance(old, Tensor) or isinstance(value, Tensor):
        return value
    if isinstance(value, list):
        return torch.tensor(value, dtype=torch.float64).reshape(old.shape).to(old)
    return torch.full_like(old, value)


def _rotary_tables(root: Any, edit: Edit) -> list[tuple[str, Any]]:
    """Return new sin/cos tables for HookedTransformer-style modules that hold `rotary_sin`, `rotary_cos` `[n_ctx, d_rot]`."""
    found = list(matches(root, edit.path))
    tables = edit.value if isinstance(edit.value, list) else [edit.value] * len(found)
    changes: list[tuple[str, Any]] = []
    for (path, module), table in zip(found, tables, strict=False):
        positions = torch.arange(module.rotary_sin.shape[0], dtype=torch.float64)
        angles = positions[:, None] * torch.tensor(table["inv_freq"], dtype=torch.float64)
        adjacent = table.get("pairing", "half") == "adjacent"
        angles = angles.repeat_interleave(2, dim=1) if adjacent else angles.repeat(1, 2)
        factor = table.get("attention_factor", 1.0)
        changes += [
            (f"{path}.rotary_sin", (angles.sin() * factor).to(module.rotary_sin)),
            (f"{path}.rotary_cos", (angles.cos() * factor).to(module.rotary_cos)),
        ]
    return changes


def _causal_windows(root: Any, edit: Edit) -> list[tuple[str, Any]]:
    """Return new boolean masks `[... n_ctx, n_ctx]`: causal, and with at most `window` keys per query unless it is None."""
    found = list(matches(root, edit.path))
    windows = edit.value if isinstance(edit.value, list) else [edit.value] * len(found)
    return [(path, _causal(old, window)) for (path, old), window in zip(found, windows, strict=False)]


def _causal(old: Tensor, window: float | None) -> Tensor:
    mask = torch.ones_like(old).tril()
    return mask if window is None else mask.triu(1 - int(window))


def _activation(root: Any, edit: Edit) -> list[tuple[str, Any]]:
    """Return the activation that transformers has under the edit's name, for every path that matches."""
    from transformers.activations import ACT2FN

    return [(path, ACT2FN[edit.value]) for path, _ in matches(root, edit.path)]


def _add(root: Any, edit: Edit) -> list[tuple[str, Any]]:
    """Return each tensor with the edit's number added: computed in float64, returned in the tensor's own dtype."""
    return [(path, _moved(old, edit.value)) for path, old in matches(root, edit.path)]


def _moved(old: Tensor, by: float) -> Tensor:
    value = (old.detach().double() + by).to(old)
    return nn.Parameter(value, requires_grad=False) if isinstance(old, nn.Parameter) else value


@dataclass(frozen=True)
class _Scaled:
    """A module's `forward` whose output is multiplied by a number."""

    forward: Callable[..., Tensor]
    factor: float

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.forward(*args, **kwargs) * self.factor

    def __repr__(self) -> str:
        return f"output times {self.factor!r}"


def _scale_output(root: Any, edit: Edit) -> list[tuple[str, Any]]:
    """Return replacements of the modules' `forward` that multiply its output by the edit's number."""
    return [(f"{path}.forward", _Scaled(module.forward, edit.value)) for path, module in matches(root, edit.path)]


OPS: dict[str, Op] = {
    "set": _set,
    "add": _add,
    "scale_output": _scale_output,
    "rotary_tables": _rotary_tables,
    "causal_windows": _causal_windows,
    "activation": _activation,
}


@dataclass
class LiveEdits:
    """The edits that are in force on one model."""

    originals: dict[str, Any] = field(default_factory=dict)
    ops: dict[str, Op] = field(default_factory=lambda: OPS)

    def bring_to(self, root: Any, edits: tuple[Edit, ...]) -> list[ReadBack]:
        """Undo all edits in force, make these edits, and return each edited path with its value before and after.

        If an edit fails, all edits are undone before the error is raised.

        Raises:
            NoSuchPath: the model does not have the path.
            ValueError: an operation that this backend does not know (`load` needs a fresh load).
        """
        self.undo(root)
        touched: list[str] = []
        try:
            for edit in edits:
                touched += self._make(root, edit)
        except BaseException:
            self.undo(root)
            raise
        unique = dict.fromkeys(touched)
        return [_read_back(path, self.originals[path], get(root, path)) for path in unique]

    def undo(self, root: Any) -> None:
        """Put every original value back."""
        for path, value in self.originals.items():
            assign(root, path, value)
        self.originals.clear()

    def _make(self, root: Any, edit: Edit) -> list[str]:
        if edit.op not in self.ops:
            raise ValueError(f"`{edit.op}` is not an edit of a live model; it needs a fresh load")
        changes = self.ops[edit.op](root, edit)
        for path, value in changes:
            self.originals.setdefault(path, get(root, path))
            assign(root, path, value)
        return [path for path, _ in changes]


def _read_back(path: str, before: Any, after: Any) -> ReadBack:
    tensors = isinstance(before, Tensor) and isinstance(after, Tensor)
    same = torch.equal(before, after) if tensors else before is after or preview(before) == preview(after)
    return ReadBack(path=path, before=preview(before), after=preview(after), changed=not same)


def preview(value: Any) -> Any:
    """Return a live value in JSON types: tensors of up to `PREVIEW` numbers as lists, longer tensors as text with their shape."""
    if isinstance(value, Tensor):
        return value.tolist() if value.numel() <= PREVIEW else f"tensor{list(value.shape)}"
    return value if isinstance(value, (int, float, str, bool, list, dict, type(None))) else repr(value)
