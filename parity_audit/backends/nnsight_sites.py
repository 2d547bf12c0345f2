"""Read one site inside an nnsight trace, write it to disk, and replace it if a replay asks for it.

The tensors of modules are read through `.output` and `.inputs`. Tensors inside attention are read through `.source`, which
gives access to the operations in the attention's own `forward`, by the names that nnsight gives them:

    query, key      arguments of the call of `attention_interface`, [b head p d_head] and [b kv_head p d_head]
    scores, pattern argument and result of the softmax, [b head q k], in `forward` itself or in the function that it calls.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from parity_audit.backends.taps import ATTENTION, METHOD, Recorder, after, before
from parity_audit.core.types import SiteTap

INTERFACE, SOFTMAX = "attention_interface", "softmax"
ARGUMENTS = {"query": 1, "key": 2}
"""Positions among the arguments of an attention function of transformers: (module, query, key, value, mask)."""
SINKS = "sinks"
NEVER_REACHED, NOT_PROVIDED = "the trace never reached it", "was not provided"


def shown(tap: SiteTap, recorder: Recorder, envoy: Any) -> None:
    """Record the site of one tap inside an invoke.

    If its module does not run, or nnsight has no source of the code, the site is recorded as not visible.
    """
    out_of_order, without_source = _errors()
    try:
        _take(tap, recorder, envoy)
    except out_of_order:
        recorder.misses(tap, NEVER_REACHED)
    except ValueError as error:  # nnsight 0.5 and 0.6 raise this if the code took another branch
        if NOT_PROVIDED not in str(error):
            raise
        recorder.misses(tap, NEVER_REACHED)
    except without_source as error:
        recorder.misses(tap, f"nnsight has no source of it: {error}")


@cache
def _errors() -> tuple[Any, Any]:
    """Return the errors that this release raises if a trace does not reach a module, and if code has no source."""
    from nnsight.intervention import interleaver

    out_of_order = getattr(interleaver, "OutOfOrderError", None) or interleaver.Mediator.OutOfOrderError
    try:
        from nnsight.intervention.source import SourceNotAvailable
    except ImportError:  # before nnsight 0.8, Python's own error for missing source
        return out_of_order, OSError
    return out_of_order, SourceNotAvailable


def _take(tap: SiteTap, recorder: Recorder, envoy: Any) -> None:
    if tap.take.startswith(ATTENTION):
        _attention(tap, recorder, envoy.source)
    elif tap.take.startswith(METHOD):
        recorder.misses(tap, "it is made by a method other than forward, which a trace does not show")
    elif tap.take.startswith("input"):
        replaced = before(tap, recorder, None, *envoy.inputs)
        if replaced is not None:
            envoy.inputs = replaced
    else:
        replaced = after(tap, recorder, None, None, envoy.output)
        if replaced is not None:
            envoy.output = replaced


def _attention(tap: SiteTap, recorder: Recorder, source: Any) -> None:
    what = tap.take.removeprefix(ATTENTION)
    call = _last(source, INTERFACE)
    if what in ARGUMENTS:
        if call is None:
            recorder.misses(tap, f"this attention's code calls no `{INTERFACE}`")
        else:
            _argument(tap, recorder, call, ARGUMENTS[what])
        return
    inside = source if call is None else call.source
    softmax = _last(inside, SOFTMAX)
    if softmax is None or _last(inside, SINKS) is not None:
        why = (
            "the attention kernel does not show it" if softmax is None else "its softmax takes sinks beside the scores"
        )
        recorder.misses(tap, why)
        return
    replaced = recorder.see(tap, softmax.input if what == "scores" else softmax.output)
    if replaced is None:
        return
    if what == "scores":
        softmax.input = replaced
    else:
        softmax.output = replaced


def _argument(tap: SiteTap, recorder: Recorder, call: Any, number: int) -> None:
    args, kwargs = call.inputs
    replaced = recorder.see(tap, args[number])
    if replaced is not None:
        call.inputs = ((*args[:number], replaced, *args[number + 1 :]), kwargs)


def _last(source: Any, name: str) -> Any:
    """Return the last operation of a name, None if there is none.

    nnsight names an operation by its function and a number. A function that is first bound to a name and then called has two
    operations, of which the last is the call.
    """
    names = source.names if hasattr(source, "names") else getattr(source, "accessor", source).line_numbers  # before 0.8
    found = [full for full in names if full.rpartition("_")[0].endswith(name)]
    return getattr(source, found[-1]) if found else None
