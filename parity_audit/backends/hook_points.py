"""Hooks as users of TransformerLens set them: by name, through the model's own `hooks(...)`.

The library converts layouts for its own hooks, follows aliases, and computes some activations only where it knows that
somebody looks; a plain module hook on the same object sees none of that.
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
    """A hook for every tap that names one. What the release refuses is not visible, in its own words."""
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
    """A value that begins with (batch, pos) and has as many axes as the site is canonical already: many releases
    convert layouts for their own hooks. Else it has the layout of the module behind the hook."""
    batch_first = value.shape[:2] == recorder.request.probe.shape
    axes = len(tap.layout.partition(" -> ")[2].split())
    canonical = batch_first and value.ndim == axes
    return recorder.see(replace(tap, layout="", sizes={}) if canonical else tap, value)


@contextmanager
def _results(model: Any) -> Iterator[None]:
    """`use_attn_result` on, and as it was afterwards. A release that cannot switch it on has no such hook to show."""
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
