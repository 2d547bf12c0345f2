"""Set hooks as users of TransformerLens set them: by name, through the model's own `hooks(...)`.

The library converts layouts for its own hooks, resolves aliases of hook names, and computes some activations only if it knows
of a hook that uses them. A plain module hook on the same object gets none of this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from parity_audit.backends.taps import HOOK, Recorder
from parity_audit.core.types import SiteTap

RESULT = "attn.hook_result"


@contextmanager
def named_hooks(model: Any, recorder: Recorder) -> Iterator[None]:
    """Set a hook for every tap that names one, while the context is open.

    If the release refuses a hook, the site is recorded as not visible, with the release's error message.
    """
    wanted = [tap for tap in recorder.request.taps if tap.take == HOOK]
    with ExitStack() as stack:
        if any(tap.module.endswith(RESULT) for tap in wanted):
            stack.enter_context(_results(model))
        for tap in wanted:
            try:
                stack.enter_context(model.hooks(fwd_hooks=[(tap.module, partial(_seen, tap, recorder))]))
            except Exception as error:
                first = str(error).strip().partition("\n")[0]
                why = f"the release refuses the hook: {type(error).__name__}: {first[:160]}"
                recorder.misses(tap, why)
        yield


def _seen(tap: SiteTap, recorder: Recorder, value: Tensor, hook: Any) -> Tensor | None:
    """Record the tensor of a hook and return its replacement, None if it is not replaced.

    A tensor whose first axes are (batch, pos) and that has as many axes as the site is in the canonical layout already, because
    many releases convert layouts for their own hooks. Any other tensor has the layout of the module behind the hook.
    """
    batch_first = value.shape[:2] == recorder.request.probe.shape
    axes = len(tap.layout.partition(" -> ")[2].split())
    canonical = batch_first and value.ndim == axes
    return recorder.see(replace(tap, layout="", sizes={}) if canonical else tap, value)


@contextmanager
def _results(model: Any) -> Iterator[None]:
    """Switch `use_attn_result` on while the context is open, and restore it afterwards.

    If the release cannot switch it on, nothing is changed; such a release does not have the hook either.
    """
    before = bool(getattr(model.cfg, "use_attn_result", False))
    try:
        model.set_use_attn_result(True)
    except Exception:
        yield
        return
    try:
        yield
    finally:
        model.set_use_attn_result(before)
