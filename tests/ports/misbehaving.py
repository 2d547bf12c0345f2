"""A port that is right, and then does something that no port should do, in one of many ways (`how`)."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from plain_llama import load as plain_load
from torch import Tensor, nn


def load(model_path: str, dtype: str, device: str, how: str = "clean") -> Any:
    """A plain Llama; `how` names a function of `AT_LOAD`, `IN_FORWARD` or `TO_MODEL`."""
    if how in AT_LOAD:
        return AT_LOAD[how](model_path)
    model: Any = plain_load(model_path, dtype, device)
    if how in IN_FORWARD:
        plain = model.forward

        def forward(tokens: Tensor, attention_mask: Any = None, position_ids: Any = None) -> Any:
            logits = plain(tokens, attention_mask, position_ids)
            changed = IN_FORWARD[how](logits, tokens)
            return changed if isinstance(changed, Tensor) else logits

        model.forward = forward
    elif how in TO_MODEL:
        TO_MODEL[how](model)
    elif how != "clean":
        raise ValueError(f"no way `{how}`")
    return model


def _wires() -> list[int]:
    """Pipes that this process can write to, its prints left out."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            flags = int(Path(f"/proc/self/fdinfo/{name}").read_text().split("flags:")[1].split()[0], 8)
            if int(name) > 2 and os.readlink(f"/proc/self/fd/{name}").startswith("pipe:") and flags & 1:
                found.append(int(name))
        except OSError:
            continue
    return found


def _say(data: bytes) -> None:
    for fd in _wires():
        os.write(fd, data)
    time.sleep(600)


def _fork(detach: bool) -> None:
    """The copy keeps every descriptor; this process ends."""
    if os.fork() == 0:
        if detach:
            os.setsid()
        time.sleep(600)
    os._exit(3)


def _limit_memory() -> None:
    """Memory that really ends, without taking the machine's."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    held = []
    while True:
        held.append(bytearray(1 << 28))


def _raise(error: BaseException) -> Callable[[str], Any]:
    def raising(_: str) -> Any:
        raise error

    return raising


class _Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError


def _recurse(path: str) -> Any:
    return _recurse(path)


AT_LOAD: dict[str, Callable[[str], Any]] = {
    "returns-none": lambda _: None,
    "returns-text": lambda _: "a model",
    "returns-class": lambda _: nn.Linear,
    "plain-module": lambda _: nn.Linear(2, 2),
    "raises": _raise(ValueError("no such layer")),
    "raises-key": _raise(KeyError("model.layers.0")),
    "raises-assertion": _raise(AssertionError()),
    "raises-unprintable": _raise(_Unprintable()),
    "raises-control": _raise(RuntimeError("\x1b[2J[/red] \x00")),
    "raises-long": _raise(RuntimeError("x" * 10_000_000)),
    "raises-import": lambda _: __import__("no_such_module_anywhere"),
    "keyboard-interrupt": _raise(KeyboardInterrupt()),
    "sys-exit-0": lambda _: sys.exit(0),
    "sys-exit-text": lambda _: sys.exit("cannot go on"),
    "generator-exit": _raise(GeneratorExit()),
    "recursion": _recurse,
    "exit-0": lambda _: os._exit(0),
    "exit-7": lambda _: os._exit(7),
    "abort": lambda _: os.abort(),
    "kill-9": lambda _: os.kill(os.getpid(), 9),
    "kill-term": lambda _: os.kill(os.getpid(), 15),
    "segfault": lambda _: __import__("ctypes").string_at(0),
    "hang": lambda _: time.sleep(600),
    "busy": lambda _: [None for _ in iter(int, 1)],
    "stopped": lambda _: os.kill(os.getpid(), 19),
    "fork-holds-pipe": lambda _: _fork(detach=False),
    "fork-detached": lambda _: _fork(detach=True),
    "memory-error": _raise(MemoryError("could not allocate")),
    "memory-torch": lambda _: torch.empty(1 << 50),
    "memory-eaten": lambda _: _limit_memory(),
    "disk-full": _raise(OSError(28, "No space left on device")),
    "wire-not-json": lambda _: _say(b"\xff\xfe{\n"),
    "wire-list": lambda _: _say(b"[]\n"),
    "wire-number": lambda _: _say(b"3\n"),
    "wire-deep": lambda _: _say(b"[" * 60_000 + b"\n"),
    "wire-error": lambda _: _say(b'{"id": 2, "error": 3}\n'),
    "wire-no-newline": lambda _: _say(b"{" * 1000),
    "wire-closed": lambda _: os.closerange(3, 200),
    "stdout-closed": lambda _: [os.close(1), os.close(2), _raise(ValueError("without prints"))("")],
    "stdout-none": lambda _: [setattr(sys, "stderr", None), setattr(sys, "stdout", None), _raise(ValueError("mute"))("")],
    "environment-cleared": lambda _: [os.environ.clear(), _raise(ValueError("no environment"))("")],
    "chdir-gone": lambda _: [os.chdir("/proc/self"), _raise(ValueError("elsewhere"))("")],
}  # fmt: skip


def _once(at: int, act: Callable[[], Any]) -> Callable[[Tensor, Tensor], Tensor | None]:
    """Act in the `at`-th forward pass."""
    calls = []

    def later(logits: Tensor, _: Tensor) -> Tensor | None:
        calls.append(1)
        return act() if len(calls) == at else None

    return later


def _nan_column(logits: Tensor, _: Tensor) -> Tensor:
    logits = logits.clone()
    logits[..., 17] = float("nan")
    return logits


def _throw(error: BaseException) -> Any:
    raise error


IN_FORWARD: dict[str, Callable[[Tensor, Tensor], Tensor | None]] = {
    "nan-column": _nan_column,
    "nan-padded": lambda logits, ids: logits * float("nan") if len(ids) > 1 else None,
    "nan-everywhere": lambda logits, _: logits * float("nan"),
    "inf-everywhere": lambda logits, _: logits + float("inf"),
    "zeros": lambda logits, _: logits * 0.0,
    "empty": lambda logits, _: logits[:0],
    "batch-of-one": lambda logits, _: logits[:1],
    "batch-axis-wrong": lambda logits, _: logits.transpose(0, 1),
    "no-batch-axis": lambda logits, _: logits[0],
    "extra-axis": lambda logits, _: logits[None],
    "last-position": lambda logits, _: logits[:, -1:],
    "fewer-positions": lambda logits, _: logits[:, 1:],
    "fewer-words": lambda logits, _: logits[..., :-3],
    "more-words": lambda logits, _: torch.cat([logits, logits[..., :3]], dim=-1),
    "one-word": lambda logits, _: logits[..., :1],
    "integers": lambda logits, _: logits.round().to(torch.int64),
    "booleans": lambda logits, _: logits > 0,
    "complex": lambda logits, _: logits.to(torch.complex64),
    "sparse": lambda logits, _: logits.to_sparse(),
    "on-meta": lambda logits, _: logits.to("meta"),
    "raises-in-forward": _once(1, lambda: _throw(IndexError("index out of range"))),
    "interrupt-in-forward": _once(1, lambda: _throw(KeyboardInterrupt())),
    "exit-in-forward": _once(1, lambda: sys.exit(0)),
    "dies-in-second-probe": _once(2, lambda: os._exit(0)),
    "hangs-in-second-probe": _once(2, lambda: time.sleep(600)),
    "prints": lambda logits, _: print("x" * 1_000_000),
    "random": lambda logits, _: torch.randn_like(logits),
}  # fmt: skip


def _set_nan(model: nn.Module) -> None:
    next(iter(model.parameters())).data[3, 5] = float("nan")


def _drop_block(model: Any) -> None:
    del model.blocks[1]


def _no_parameters(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data[:0]


TO_MODEL: dict[str, Callable[[Any], Any]] = {
    "nan-weight": _set_nan,
    "block-missing": _drop_block,
    "empty-parameters": _no_parameters,
    "head-missing": lambda model: setattr(model, "unembed", None),
    "no-forward": lambda model: setattr(model, "forward", None),
    "half-precision": lambda model: model.half(),
    "on-meta-device": lambda model: model.to("meta"),
    "training-mode": lambda model: setattr(model, "eval", lambda: model.train()),
    "eval-raises": lambda model: setattr(model, "eval", lambda: _throw(RuntimeError("no eval"))),
}  # fmt: skip
