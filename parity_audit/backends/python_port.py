"""The backend for a user's own port, `python:FILE:FUNCTION`: a function that returns a loaded model.

The class of the returned model decides which backend's code runs it and which section of the spec describes it. It may be a
transformers model, a HookedTransformer, a TransformerBridge, or any other `nn.Module` with a site map.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn

from parity_audit.backends.base import Tell
from parity_audit.backends.facts import use_exact_float32
from parity_audit.backends.text_model import text_model
from parity_audit.backends.wrappers import unwrapped
from parity_audit.core.rollouts import SampleReply, SampleRequest
from parity_audit.core.types import Description, NotTested, ReadBack, WeightPrint
from parity_audit.core.wire import ApplyRequest, LoadRequest, RunReply, RunRequest, WeightsRequest

HARNESS_SETTINGS = ("env", "python", "sites", "tf32")
MODULE = "module"
KINDS = {
    "TransformerBridge": "transformer_bridge",
    "HookedTransformer": "hooked_transformer",
    "PreTrainedModel": "hf",
}


class PortError(Exception):
    """A port cannot be used; the message tells its author what is wrong."""


class PythonPort:
    """Runs the model that the user's function returned with the code of the backend for that kind of model."""

    inner: Any
    section: str
    modes_not_run: tuple[NotTested, ...] = ()

    def prepare(self, request: LoadRequest) -> None:
        """Do nothing: the user's file makes its own imports, and it is imported once, in `load`."""

    def load(self, request: LoadRequest) -> None:
        """Import the user's file, call the function, and take the model that it returns.

        Raises:
            PortError: the function is missing, cannot be called, or returns nothing that can be audited.
        """
        use_exact_float32(allow_tf32=bool(request.settings.get("tf32", False)))
        file, _, name = str(request.target).rpartition(":")
        replaced: dict[str, Any] = {}
        with ExitStack() as stack:
            if request.checkpoint.synthetic is not None and "transformer_lens" in Path(file).read_text():
                stack.enter_context(_sizes_replaced(request, replaced))
            model = unwrapped(_called(_function(Path(file), name), request))
        self.modes_not_run = dropping(model) if isinstance(model, nn.Module) else ()
        self.take(model, request)
        self.inner.replaced = replaced

    def take(self, model: Any, request: LoadRequest) -> None:
        """Prepare to run this model with the code of the backend for its kind.

        Raises:
            PortError: it is no model, or a plain module without a site map.
        """
        self.section = kind_of(model)
        self.inner = _runner(self.section)
        own = {key: value for key, value in request.settings.items() if key not in HARNESS_SETTINGS}
        reads = request.reads_by_section.get(self.section, {})
        self.inner.request = dataclasses.replace(request, settings=own, reads=reads)
        self.inner.model = text_model(model) if self.section == "hf" else model
        if self.section == MODULE and MODULE not in request.reads_by_section:
            raise PortError(
                f"{_described(model)} needs a site map: `sites=map.yaml` in the BACKEND string, or `--sites map.yaml`"
            )
        model.eval()

    def describe(self) -> Description:
        """Return the inner backend's description, with the section of the spec that describes the model."""
        about: Description = self.inner.describe()
        not_run = (*about.not_run, *self.modes_not_run)
        return dataclasses.replace(about, backend="python", section=self.section, not_run=not_run)

    def weights(self, request: WeightsRequest) -> Iterator[WeightPrint]:
        """Return fingerprints of the live parameters."""
        found: Iterator[WeightPrint] = self.inner.weights(request)
        return found

    def run(self, request: RunRequest, tell: Tell) -> RunReply:
        """Run one probe."""
        reply: RunReply = self.inner.run(request, tell)
        return reply

    def replay(self, request: RunRequest, tell: Tell) -> RunReply:
        """Run one probe with sites replaced."""
        reply: RunReply = self.inner.replay(request, tell)
        return reply

    def sample(self, request: SampleRequest, tell: Tell) -> SampleReply:
        """Return greedy completions. Raises NotImplementedError for a plain module, which has no known cache."""
        ask = getattr(self.inner, "sample", None)
        if ask is None:
            raise NotImplementedError("no cache is known of a plain module, so it does not generate")
        drawn: SampleReply = ask(request, tell)
        return drawn

    def apply(self, request: ApplyRequest) -> list[ReadBack]:
        """Make edits of the live model, with the inner backend's code."""
        edited: list[ReadBack] = self.inner.apply(request)
        return edited


def dropping(model: Any) -> tuple[NotTested, ...]:
    """Return one untested item if the model is in training mode with active dropout, else nothing.

    Every run of the audit is in evaluation mode, so the audit does not cover training mode.
    """
    active = [
        module for module in model.modules() if isinstance(module, nn.Dropout) and module.training and module.p > 0.0
    ]
    if not active:
        return ()
    why = (
        f"the port was handed over in it, with {len(active)} dropout modules that are active there; it was audited after "
        "`model.eval()`, which the port has to call"
    )
    return (NotTested(what="training mode", why=why),)


def _function(file: Path, name: str) -> Callable[..., Any]:
    """Return the user's function. Its file can import modules from its own folder.

    Raises:
        PortError: the file has no such function.
    """
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if callable(found):
        return found  # type: ignore[no-any-return]
    functions = [item for item, value in vars(module).items() if inspect.isfunction(value)]
    near = difflib.get_close_matches(name, functions, 1)
    hint = f"did you mean `{near[0]}`?" if near else f"it has {', '.join(functions) or 'no function at all'}"
    raise PortError(f"{file.name} has no function `{name}`; {hint}")


def _called(function: Callable[..., Any], request: LoadRequest) -> Any:
    """Return what the function returns for this checkpoint, dtype and device; other settings are passed by name.

    Raises:
        PortError: the function does not take these arguments.
    """
    more = {key: value for key, value in request.settings.items() if key not in HARNESS_SETTINGS}
    given = (request.checkpoint.path, request.dtype, request.device)
    try:
        inspect.signature(function).bind(*given, **more)
    except TypeError as error:
        raise PortError(
            f"`{function.__name__}{inspect.signature(function)}` cannot be called as load(model_path, dtype, device"
            f"{''.join(f', {key}=...' for key in more)}): {error}"
        ) from error
    return function(*given, **more)


def kind_of(model: Any) -> str:
    """Return the name of the spec's section that describes a model. Raises PortError if it is not an `nn.Module`."""
    if not isinstance(model, nn.Module):
        raise PortError(f"the port returned {_described(model)}; it must return a model (an nn.Module)")
    names = [parent.__name__ for parent in type(model).__mro__]
    return next((section for name, section in KINDS.items() if name in names), MODULE)


def _described(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__module__}.{type(value).__qualname__}"


def _runner(section: str) -> Any:
    """Return the backend whose code runs a model of this section."""
    if section == "hf":
        from parity_audit.backends.hf import HfBackend

        return HfBackend()
    if section == "hooked_transformer":
        from parity_audit.backends.hooked_transformer import HookedTransformerBackend

        return HookedTransformerBackend()
    if section == "transformer_bridge":
        from parity_audit.backends.transformer_bridge import TransformerBridgeBackend

        return TransformerBridgeBackend()
    from parity_audit.backends.plain_module import PlainModule

    return PlainModule()


def _sizes_replaced(request: LoadRequest, replaced: dict[str, Any]) -> Any:
    """Return a context in which TransformerLens uses the checkpoint's sizes and not those it hard-codes by model name.

    The context does nothing if this release of TransformerLens has no such table.
    """
    from contextlib import nullcontext

    from parity_audit.backends.hooked_transformer import real_sizes

    if importlib.util.find_spec("transformer_lens.loading_from_pretrained") is None:
        return nullcontext()
    return real_sizes(request, replaced)
