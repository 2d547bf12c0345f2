"""Run each operation of a loaded model again, on more or fewer rows of its own input.

One run of one sequence records the input of every module that has its own weights, the inputs of the attention's matrix products
and softmax, and the logits. Each operation is then run at every size, and the same row of the result is hashed: that of the last
token, which is put first. Kernels are chosen by the number of rows, so sizes that use the same kernel give the same bits.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parity_audit.backends.attention_calls import AttentionCalls, attention_cases
from parity_audit.backends.base import Tell
from parity_audit.backends.operation_case import HeadCall, OperationCase
from parity_audit.backends.taps import returned_logits
from parity_audit.backends.wrappers import BRIDGE_PART
from parity_audit.core.operations import ROWS, Operation, OperationsReply, OperationsRequest
from parity_audit.core.types import NotTested
from parity_audit.core.wire import RunRequest

NO_ROW_OPERATION = 1e-2
"""Largest relative change of a row's result between sizes for which a module counts as computing each row on its own.

A module whose result for a row changes by more when other rows are left out mixes its rows, as attention as a whole does. The
change is then not due to the choice of kernels. The rounding error of bfloat16 is 4e-3, that of float32 6e-8."""


@dataclass
class _Recorded:
    """The arguments of each module's first call, in the order of these calls, and what the model returned last."""

    tokens: int
    calls: dict[str, tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    returned: Any = None

    def keep(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if (
            name not in self.calls
            and given
            and given[0].is_floating_point()
            and rows_axis(given[0], self.tokens) is not None
        ):
            self.calls[name] = (module, _map(args, _copied), _map(kwargs, _copied))


def operations(backend: Any, request: OperationsRequest, tell: Tell) -> OperationsReply:
    """Run every operation at every size, and return the hashes of its results.

    An operation that cannot be run alone is left out and listed as not tested, with its error.
    """
    inner = getattr(backend, "inner", backend)
    model = inner.model
    recorded, attention = _recorded(inner, model, request, tell)
    found, gaps = [], list(attention.not_tested())
    cases = [
        *_modules(recorded, request),
        *attention_cases(attention.calls, request),
        *_outputs(_head_call(inner, model, recorded), recorded, request),
    ]
    for case in cases:
        try:
            with torch.no_grad():
                operation = _measured(case)
        except Exception as error:
            gaps.append(NotTested(what=f"operation {case.name}", why=f"{type(error).__name__}: {str(error)[:200]}"))
            continue
        if operation.relative <= NO_ROW_OPERATION:
            found.append(operation)
    return OperationsReply(operations=tuple(found), not_tested=tuple(gaps))


def _recorded(backend: Any, model: Any, request: OperationsRequest, tell: Tell) -> tuple[_Recorded, AttentionCalls]:
    """Run the probe once and return the inputs of the modules and of the attention calls."""
    recorded, attention = _Recorded(tokens=request.probe.shape[1]), AttentionCalls()
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if next(module.parameters(recurse=False), None) is not None and not isinstance(module, nn.Embedding):
                stack.callback(module.register_forward_pre_hook(_keeper(recorded, name), with_kwargs=True).remove)
        stack.callback(model.register_forward_hook(_returner(recorded)).remove)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="parity-audit-operations-"))
        stack.enter_context(attention)
        backend.run(RunRequest(probe=request.probe, taps=(), out=folder), tell)
    return recorded, attention


def _keeper(recorded: _Recorded, name: str) -> Callable[..., None]:
    return lambda module, args, kwargs: recorded.keep(name, module, args, kwargs)


def _returner(recorded: _Recorded) -> Callable[..., None]:
    def keep(module: nn.Module, args: Any, output: Any) -> None:
        recorded.returned = output

    return keep


def _modules(recorded: _Recorded, request: OperationsRequest) -> Iterator[OperationCase]:
    """Yield one case per module class and parameter shapes; other modules with the same class and shapes use the same kernels."""
    groups: dict[tuple[Any, ...], OperationCase] = {}
    for name, (module, args, kwargs) in recorded.calls.items():
        shapes = tuple(tuple(one.shape) for one in module.parameters(recurse=False))
        key = (type(module).__name__, shapes)
        if key in groups:
            groups[key] = replace(groups[key], like_it=groups[key].like_it + 1)
        else:
            words = " ".join("x".join(map(str, shape)) for shape in shapes)
            at = _at(module, args, kwargs, recorded.tokens)
            path = name.replace(BRIDGE_PART, "")
            groups[key] = OperationCase(path, type(module).__name__, words, ROWS, request.sizes, at)
    yield from groups.values()


def _at(call: Callable[..., Any], args: Any, kwargs: Any, tokens: int) -> Callable[[int], Tensor]:
    """Return a function of the size that calls `call` with `size` rows and returns the first row of the result."""

    def at(size: int) -> Tensor:
        def sized(value: Any) -> Any:
            return resized(value, size, tokens) if isinstance(value, Tensor) else value

        out = call(*_map(args, sized), **_map(kwargs, sized))
        while isinstance(out, (tuple, list)):
            out = out[0]
        axis = rows_axis(out, size)
        if axis is None:
            raise ValueError(f"its result {list(out.shape)} has no axis of {size} rows")
        row: Tensor = out.select(axis, 0)
        return row

    return at


def _head_call(backend: Any, model: Any, recorded: _Recorded) -> HeadCall | Tensor | None:
    """Return the head of an engine that applies it outside the model, with its input, else the logits that the model returned.

    Returns None if there is no head and the model returned no logits.
    """
    if hasattr(backend, "head_call"):
        found: HeadCall = backend.head_call()
        return found
    value, head = returned_logits(recorded.returned), getattr(model, "compute_logits", None)
    return value if value is None or head is None else HeadCall("compute_logits", head, value)


def _outputs(
    returned: HeadCall | Tensor | None, recorded: _Recorded, request: OperationsRequest
) -> Iterator[OperationCase]:
    """Yield the cases of the outputs: the head, if the engine applies it outside the model, and log-softmax of the logits."""
    value = returned.hidden if isinstance(returned, HeadCall) else returned
    if value is None or rows_axis(value, recorded.tokens) is None:
        return
    if isinstance(returned, HeadCall):
        shape, at = f"{value.shape[-1]} in", _at(returned.head, (value,), {}, recorded.tokens)
        yield OperationCase(returned.name, "head", shape, ROWS, request.sizes, at)
        with torch.no_grad():
            value = returned.head(value)
    yield OperationCase(
        "log_softmax", "torch", f"{value.shape[-1]}", ROWS, request.sizes,
        _at(lambda logits: F.log_softmax(logits, dim=-1), (value.detach(),), {}, recorded.tokens),
    )  # fmt: skip


def rows_axis(value: Tensor, rows: int) -> int | None:
    """Return the axis of the rows: 0 for `[rows, ...]`, 1 for `[1, rows, ...]`, None for any other shape."""
    if value.ndim >= 2 and value.shape[0] == rows and not (rows == 1 and value.ndim >= 3):
        return 0
    return 1 if value.ndim >= 3 and tuple(value.shape[:2]) == (1, rows) else None


def resized(value: Tensor, size: int, tokens: int) -> Tensor:
    """Return `size` rows of a tensor with `tokens` rows: the last row, then the others from the first on, repeated as needed.

    A tensor without an axis of `tokens` rows is returned as a copy.
    """
    axis = rows_axis(value, tokens)
    if axis is None:
        return value.clone()
    return value.index_select(axis, (torch.arange(size, device=value.device) - 1) % tokens)


def _measured(case: OperationCase) -> Operation:
    hashes, relative = [], 0.0
    first: Tensor | None = None
    for size in case.sizes:
        row = case.at(size).detach().contiguous().cpu()
        hashes.append(digest(row))
        first = row.double() if first is None else first
        top = float(first.abs().max()) or 1.0
        relative = max(relative, float((row.double() - first).abs().max()) / top)
    return Operation(
        name=case.name, kind=case.kind, shape=case.shape, varied=case.varied, sizes=case.sizes, hashes=tuple(hashes),
        relative=relative, like_it=case.like_it,
    )  # fmt: skip


def digest(value: Tensor) -> str:
    """Return a hash of the bits of a contiguous tensor on the CPU."""
    return hashlib.sha256(value.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _map(values: Any, change: Callable[[Any], Any]) -> Any:
    items: Iterable[Any] = values.values() if isinstance(values, dict) else values
    changed = [change(value) for value in items]
    return dict(zip(values, changed, strict=True)) if isinstance(values, dict) else tuple(changed)
