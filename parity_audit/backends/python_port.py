"""A port of one's own: `python:FILE:FUNCTION`, a function that returns a loaded model.

What it returns decides which backend's code runs it and which section of the spec describes it: a transformers
model, a HookedTransformer, a TransformerBridge, or any other `nn.Module` with a site map.
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
    """What is wrong with a port, in words for its author."""


class PythonPort:
    """Runs what the user's function returned with the code of the backend that it is."""

    inner: Any
    section: str
    modes_not_run: tuple[NotTested, ...] = ()

    def prepare(self, request: LoadRequest) -> None:
        """Nothing: what the user's file imports is the user's, and happens once, in `load`."""

    def load(self, request: LoadRequest) -> None:
        """Import the file, call the function, and see what came back."""
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
        """Run this model with the code of the backend that it is. Raises PortError for what no section describes."""
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
        """What the backend inside says, and which section of the spec it is."""
        about: Description = self.inner.describe()
        not_run = (*about.not_run, *self.modes_not_run)
        return dataclasses.replace(about, backend="python", section=self.section, not_run=not_run)

    def weights(self, request: WeightsRequest) -> Iterator[WeightPrint]:
        """Fingerprints of the live parameters."""
        found: Iterator[WeightPrint] = self.inner.weights(request)
        return found

    def run(self, request: RunRequest, tell: Tell) -> RunReply:
        """One forward pass."""
        reply: RunReply = self.inner.run(request, tell)
        return reply

    def replay(self, request: RunRequest, tell: Tell) -> RunReply:
        """One forward pass with sites replaced."""
        reply: RunReply = self.inner.replay(request, tell)
        return reply

    def sample(self, request: SampleRequest, tell: Tell) -> SampleReply:
        """Greedy completions. Raises NotImplementedError for a plain module, of which no cache is known."""
        ask = getattr(self.inner, "sample", None)
        if ask is None:
            raise NotImplementedError("no cache is known of a plain module, so it does not generate")
        drawn: SampleReply = ask(request, tell)
        return drawn

    def apply(self, request: ApplyRequest) -> list[ReadBack]:
        """Live edits, through the same knobs as the backend that the port is made of."""
        edited: list[ReadBack] = self.inner.apply(request)
        return edited


def dropping(model: Any) -> tuple[NotTested, ...]:
    """That a model was handed over in training mode, with dropout that is active there; every run is in evaluation mode."""
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
    """The user's function; modules beside its file can be imported."""
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
    """What the function returns for this checkpoint, dtype and device; other settings go to it by name."""
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
    """The section of the spec that describes a model. Raises PortError for what is no model."""
    if not isinstance(model, nn.Module):
        raise PortError(f"the port returned {_described(model)}; it must return a model (an nn.Module)")
    names = [parent.__name__ for parent in type(model).__mro__]
    return next((section for name, section in KINDS.items() if name in names), MODULE)


def _described(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__module__}.{type(value).__qualname__}"


def _runner(section: str) -> Any:
    """The code that runs such a model."""
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
    """Sizes of a miniature where the port's TransformerLens hard-codes those of the release by name."""
    from contextlib import nullcontext

    from parity_audit.backends.hooked_transformer import real_sizes

    if importlib.util.find_spec("transformer_lens.loading_from_pretrained") is None:
        return nullcontext()
    return real_sizes(request, replaced)
