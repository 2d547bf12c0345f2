"""Faults for ports: each operation breaks one thing in a live transformers (or TransformerLens) model.

Runs inside the worker of a `python:` port, on whatever stack is there. A fault is data: a list of operations
`{op: NAME, ...}`; `layers` narrows `{l}` in names (all layers when absent).
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Plant = dict[str, Any]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
FROM_CONFIG = ("config", "build")
"""Ops that change the config: values that the live model still reads, and values that decide which modules it is built of."""
PROCESSED = "processed"
"""The op of a HookedTransformer that is loaded as it is by default: with folded norms, and centred weights."""
EPS_NAMES = ("eps", "variance_epsilon", "epsilon")
WRITTEN_EPS = 1e-5
"""The eps of norms that hold none: OLMo writes it into its code."""
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardswish": F.hardswish,
    "silu_rounded": lambda x: F.silu(x).bfloat16().to(x),
    "silu_twice": lambda x: F.silu(F.silu(x)),
    "gelu_cut": lambda x: F.gelu(x).clamp(max=0.5),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "leaky": lambda x: F.leaky_relu(x, 0.01),
    "softplus": F.softplus,
}


def load(plants: list[Plant], model_path: str, dtype: str, device: str) -> nn.Module:
    """A transformers model with every plant in it."""
    config = transformers.AutoConfig.from_pretrained(model_path)
    for plant in plants:
        if plant["op"] in FROM_CONFIG:
            _configure(config, plant)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_path, config=config, attn_implementation="eager", dtype=getattr(torch, dtype)
    )
    for plant in plants:
        if plant["op"] not in FROM_CONFIG:
            OPERATIONS[plant["op"]](model, plant)
    return model.to(device).eval()


def load_hooked(plants: list[Plant], name: str, dtype: str, device: str) -> nn.Module:
    """A HookedTransformer with every plant in it; modules are named as TransformerLens names them."""
    import transformer_lens

    port, processed = transformer_lens.HookedTransformer, any(plant["op"] == PROCESSED for plant in plants)
    load = port.from_pretrained if processed else port.from_pretrained_no_processing
    model: nn.Module = load(name, device=device, dtype=getattr(torch, dtype))
    for plant in plants:
        if plant["op"] != PROCESSED:
            OPERATIONS[plant["op"]](model, plant)
    return model.eval()


def _configure(config: Any, plant: Plant) -> None:
    """Config values; `rope_theta` and `rope_scaling` go where this release of transformers keeps them."""
    values = {key: value for key, value in plant.items() if key != "op"}
    rope = {key: values.pop(key) for key in ("rope_theta", "rope_scaling") if key in values}
    for key, value in values.items():
        setattr(config, key, value)
    if rope:
        old = dict(config.rope_parameters)
        theta = rope.get("rope_theta", old["rope_theta"])
        scaling = rope.get("rope_scaling", {key: value for key, value in old.items() if key != "rope_theta"})
        config.rope_parameters = {"rope_type": "default", **(scaling or {}), "rope_theta": theta}


def _names(model: nn.Module, pattern: str, layers: Iterable[int] | None) -> list[str]:
    """Names of the modules or parameters that a pattern stands for, in the given layers."""
    known = {name for name, _ in model.named_modules()} | {
        name for name, _ in model.named_parameters(remove_duplicate=False)
    }
    if "{l}" not in pattern:
        return [pattern]
    chosen = range(1000) if layers is None else layers
    found = [name for layer in chosen if (name := pattern.replace("{l}", str(layer))) in known]
    if not found:
        raise LookupError(f"no `{pattern}` in this model")
    return found


def _modules(model: nn.Module, plant: Plant) -> list[nn.Module]:
    return [model.get_submodule(name) for name in _names(model, plant["module"], plant.get("layers"))]


def set_attribute(model: nn.Module, plant: Plant) -> None:
    """`attr` of modules becomes `value`, is multiplied by `times`, or rounded to a dtype."""
    for module in _modules(model, plant):
        before = getattr(module, plant["attr"])
        value = before * plant["times"] if "times" in plant else plant.get("value")
        if "round" in plant:
            value = before.to(DTYPES[plant["round"]]).to(before.dtype)
        if isinstance(before, Tensor):
            with torch.no_grad():
                before.copy_(torch.as_tensor(value))
        else:
            setattr(module, plant["attr"], value)


def change_output(model: nn.Module, plant: Plant) -> None:
    """What modules return is changed: see `_changed`."""
    for module in _modules(model, plant):
        module.register_forward_hook(lambda _, args, out: _first(out, lambda x: _changed(x, plant, args)))


def change_input(model: nn.Module, plant: Plant) -> None:
    """What modules are given is changed: see `_changed`."""

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (_changed(args[0], plant, args), *args[1:]), kwargs
        key = "hidden_states"
        return args, {**kwargs, key: _changed(kwargs[key], plant, args)}

    for module in _modules(model, plant):
        module.register_forward_pre_hook(before, with_kwargs=True)


def _first(out: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(out, tuple):
        return (change(out[0]), *out[1:])
    return change(out)


def _changed(x: Tensor, plant: Plant, args: Any) -> Tensor:
    """times, plus, dtype, cap, token, from_position, rows: the change is made only at those ids, positions and batch rows."""
    y = x
    if "times" in plant:
        y = y * plant["times"]
    if "plus" in plant:
        y = y + plant["plus"]
    if "dtype" in plant:
        scale = plant.get("scale", 1.0)
        y = (y / scale).to(DTYPES[plant["dtype"]]).to(x.dtype) * scale
    if "noise" in plant:  # another draw in every run
        y = y + plant["noise"] * torch.randn_like(y)
    if "pad" in plant:
        y = F.pad(y, (0, plant["pad"]))
    if "cap" in plant:
        y = torch.tanh(y / plant["cap"]) * plant["cap"]
    if "clip" in plant:
        y = y.clamp(-plant["clip"], plant["clip"])
    if plant.get("skip"):
        y = args[0]
    if plant.get("centre"):
        y = y - y.mean(-1, keepdim=True)
    if "curve" in plant:
        y = ACTIVATIONS[plant["curve"]](y)
    if "without" in plant:  # this many directions, drawn at random
        drawn = torch.randn(y.shape[-1], plant["without"], generator=torch.Generator().manual_seed(0))
        basis = torch.linalg.qr(drawn).Q.to(y)
        y = y - y @ basis @ basis.T
    if "heads" in plant:  # [b p (head d_head)]: only these heads
        keep = torch.zeros(plant["n_heads"], dtype=torch.bool)
        keep[plant["heads"]] = True
        y = torch.where(keep.repeat_interleave(x.shape[-1] // plant["n_heads"]), y, x)
    if "token" in plant:
        y = torch.where((args[0] == plant["token"])[..., None], y, x)
    if "from_position" in plant:
        y = torch.cat([x[:, : plant["from_position"]], y[:, plant["from_position"] :]], dim=1)
    if "rows" in plant:
        rows = torch.isin(torch.arange(x.shape[0]), torch.tensor(plant["rows"]))
        y = torch.where(rows.view(-1, *[1] * (x.ndim - 1)), y, x)
    return y


def change_weight(model: nn.Module, plant: Plant) -> None:
    """A parameter is transposed, scaled, shifted, permuted, rounded, zeroed, or another's, or swapped with another."""
    for name in _names(model, plant["name"], plant.get("layers")):
        weight = model.get_parameter(name)
        with torch.no_grad():
            if plant["do"] == "copy":
                weight.copy_(model.get_parameter(plant["with"]))
            elif plant["do"] == "swap":
                other = model.get_parameter(_sibling(plant["with"], plant["name"], name))
                kept = weight.clone()
                weight.copy_(other)
                other.copy_(kept)
            else:
                weight.copy_(_rewritten(weight.clone(), plant))


def _sibling(pattern: str, own_pattern: str, name: str) -> str:
    head, _, tail = own_pattern.partition("{l}")
    return pattern.replace("{l}", name.removeprefix(head).removesuffix(tail))


def _rewritten(weight: Tensor, plant: Plant) -> Tensor:
    what = plant["do"]
    if what == "transpose":
        return weight.T.contiguous()
    if what == "times":
        return weight * plant["by"]
    if what == "plus":
        return weight + plant["by"]
    if what in ("zero", "one"):
        return torch.full_like(weight, float(what == "one"))
    if what == "zero_rows":
        weight[plant["start"] : plant["stop"]] = 0
        return weight
    if what == "round":
        return weight.to(DTYPES[plant["to"]]).to(weight)
    if what == "int8":
        scale = weight.abs().amax(dim=-1, keepdim=True) / 127
        return (weight / scale).round() * scale
    if what == "roll_rows":
        return weight.roll(plant["by"], dims=0)
    if what == "interleave":  # halves of each head become alternating rows
        heads = weight.reshape(-1, 2, plant["d_head"] // 2, *weight.shape[1:])
        return heads.transpose(1, 2).reshape(weight.shape)
    if what == "noise":
        generator = torch.Generator().manual_seed(7)
        return weight + plant["by"] * weight.std() * torch.randn(weight.shape, generator=generator)
    raise ValueError(what)


def _eps_of(module: nn.Module) -> str:
    """The attribute that holds the eps of a norm, or may hold it."""
    return next((name for name in EPS_NAMES if hasattr(module, name)), EPS_NAMES[0])


def replace_norm(model: nn.Module, plant: Plant) -> None:
    """Norms with another kind, eps, offset, place of eps, dtype, or without their bias."""
    for module in _modules(model, plant):
        module.forward = _norm(module, plant)  # type: ignore[method-assign]


def _norm(module: nn.Module, plant: Plant) -> Callable[[Tensor], Tensor]:
    held = _eps_of(module)
    setattr(module, held, plant.get("eps", getattr(module, held, WRITTEN_EPS)))

    def forward(x: Tensor) -> Tensor:
        eps = getattr(module, held)  # read anew, so that a patch takes
        y = x.to(DTYPES[plant["dtype"]]) if "dtype" in plant else x
        if plant.get("kind", "rms") == "layer":
            y = y - y.mean(-1, keepdim=True)
        mean = y.square().mean((-2, -1) if plant.get("all_heads") else -1, keepdim=True)
        y = y / (mean.sqrt() + eps) if plant.get("eps_outside") else y * torch.rsqrt(mean + eps)
        weight = getattr(module, "weight", None)
        if weight is not None and plant.get("weight", True):
            y = y * (weight + plant.get("offset", 0.0))
        bias = getattr(module, "bias", None)
        if bias is not None and plant.get("bias", True):
            y = y + bias
        return y.to(x.dtype)

    return forward


def replace_activation(model: nn.Module, plant: Plant) -> None:
    """Another activation function; the old one may be a module or a function."""

    class Activation(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return ACTIVATIONS[plant["fn"]](x)

    for module in _modules(model, plant):
        setattr(module, plant.get("attr", "act_fn"), Activation())


class _LowSoftmax(TorchFunctionMode):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.softmax, torch.softmax, Tensor.softmax):
            low = args[0].clamp(min=torch.finfo(self.dtype).min).to(self.dtype)
            return func(low, *args[1:], **{**kwargs, "dtype": self.dtype}).to(args[0].dtype)
        return func(*args, **kwargs)


class _LowProducts(TorchFunctionMode):
    """The first product of matrices, which is that of queries and keys, comes out in a low dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.done = dtype, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if self.done or func not in (torch.matmul, Tensor.matmul, Tensor.__matmul__):
            return made
        self.done = True
        return made.to(self.dtype).to(made.dtype)


def change_attention(model: nn.Module, plant: Plant) -> None:
    """The additive mask `[b 1 query key]` is rewritten, or softmax or scores run in a low dtype, around the model's own code.

    With `decoded`, only where queries go on from a cache.
    """
    modules = _modules(model, plant)
    source = sys.modules[type(modules[0]).__module__]
    if not hasattr(source, "eager_attention_forward"):  # older code: the arithmetic is a method
        for module in modules:
            if not hasattr(module, "_attn"):
                module.forward = functools.partial(_attend_all, module.forward, plant)
                continue
            module._attn = functools.partial(_attend, module._attn, plant)
            if plant.keys() & {"causal", "ahead"} and isinstance(getattr(module, "bias", None), Tensor):
                module.bias = torch.ones_like(module.bias)
        return
    original = source.eager_attention_forward
    chosen = weakref.WeakSet(modules)

    def planted(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, *rest: Any, **more: Any
    ) -> Any:
        if module not in chosen:
            return original(module, query, key, value, mask, *rest, **more)
        return _attend(functools.partial(original, module), plant, query, key, value, mask, *rest, **more)

    source.eager_attention_forward = planted


def _attend(
    attention: Callable[..., Any],
    plant: Plant,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *rest: Any,
    **more: Any,
) -> Any:
    """The model's own attention, given a broken mask, the wrong keys and values, or a low dtype for its softmax, or with its heads
    joined without the transposition."""
    if plant.get("decoded") and query.shape[2] == key.shape[2]:
        return attention(query, key, value, mask, *rest, **more)
    mask = _masked(mask, query, key, plant)
    if "dtype" in plant:
        key, value = (x.to(DTYPES[plant["dtype"]]).to(x.dtype) for x in (key, value))
    if plant.get("value_norm"):
        value = F.rms_norm(value, value.shape[-1:])
    if "values" in plant:
        value = value.roll(plant["values"], dims=2)
    if "times" in plant:
        query = query * plant["times"]
    if "repeat" in plant:  # groups dealt out the wrong way round
        key, value = key.roll(plant["repeat"], dims=1), value.roll(plant["repeat"], dims=1)
    with contextlib.ExitStack() as low:
        if "softmax" in plant:
            low.enter_context(_LowSoftmax(DTYPES[plant["softmax"]]))
        if "products" in plant:
            low.enter_context(_LowProducts(DTYPES[plant["products"]]))
        made = attention(query, key, value, mask, *rest, **more)
    if not plant.get("joined_by_heads"):
        return made
    z, pattern = made  # `[b query head d]`
    return z.transpose(1, 2).reshape(z.shape), pattern


def _attend_all(forward: Callable[..., Any], plant: Plant, hidden: Tensor, *rest: Any, **more: Any) -> Any:
    """Attention that is written out in one function: what it is handed as a mask, and its softmax."""
    given = more["attention_mask"]
    if given is not None:
        of = (hidden.new_empty(len(hidden), 1, size, 1) for size in given.shape[2:])
        more = {**more, "attention_mask": _masked(given, *of, plant)}
    with _LowSoftmax(DTYPES[plant["softmax"]]) if "softmax" in plant else contextlib.nullcontext():
        return forward(hidden, *rest, **more)


def _masked(mask: Tensor | None, query: Tensor, key: Tensor, plant: Plant) -> Tensor:
    low = torch.finfo(query.dtype).min
    queries, keys = query.shape[2], key.shape[2]
    i, j = torch.arange(keys - queries, keys)[:, None], torch.arange(keys)[None, :]
    if mask is None:
        mask = torch.where(j <= i, 0.0, low).expand(query.shape[0], 1, queries, keys)
    seen = mask > low / 2
    real = seen.any(dim=2, keepdim=True)
    if "causal" in plant and not plant["causal"]:
        seen = real.expand_as(seen)
    if "ahead" in plant:
        seen = seen | (real & (j <= i + plant["ahead"]))
    if plant.get("padding_seen"):
        seen = (j <= i).expand_as(seen)
    if plant.get("no_self"):
        seen = seen & ((j != i) | (i == 0))
    if "window" in plant:
        first = real & (real.long().cumsum(-1) <= plant.get("first", 0))
        seen = real & (j <= i) & ((j > i - plant["window"]) | first)
    if "diagonal" in plant:
        own = (j == i).to(query.dtype) * plant["diagonal"]
        return torch.where(seen, own, low).to(query.dtype)
    if "forget" in plant:
        seen = seen & (j >= plant["forget"])
    out = torch.where(seen, 0.0, -plant["less"] if "less" in plant else low).to(query.dtype)
    if "alibi" in plant:
        slopes = torch.tensor([2.0 ** (-8 * (h + 1) / query.shape[1]) for h in range(query.shape[1])]) * plant["alibi"]
        out = out + slopes[None, :, None, None] * (j - i).clamp(max=0)
    return out


def narrow_hooked(model: nn.Module, plant: Plant) -> None:
    """HookedTransformer's causal mask lets every query see `window` keys only."""

    def narrowed(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def apply(scores: Tensor, *rest: Any, **more: Any) -> Tensor:
            out = original(scores, *rest, **more)
            queries, keys = out.shape[-2:]
            i, j = torch.arange(keys - queries, keys)[:, None], torch.arange(keys)[None, :]
            return torch.where(j > i - plant["window"], out, float("-inf"))

        return apply

    for module in _modules(model, plant):
        module.apply_causal_mask = narrowed(module.apply_causal_mask)  # type: ignore[assignment, arg-type]


def change_rotary(model: nn.Module, plant: Plant) -> None:
    """The (cos, sin) that the rotary module returns: factor, dtype, of other positions; or how they are applied: pairing, partial,
    keys only."""
    module = model.get_submodule(plant.get("module", "model.rotary_emb"))

    def places(_: nn.Module, args: Any, kwargs: Any) -> Any:
        x, ids, *others = (*args, *kwargs.values())
        return (x, _elsewhere(ids, plant), *others), {}

    def tables(_: nn.Module, args: Any, out: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        cos, sin = out
        if "factor" in plant:
            cos, sin = cos * plant["factor"], sin * plant["factor"]
        if "dtype" in plant:
            cos, sin = (x.to(DTYPES[plant["dtype"]]).to(x.dtype) for x in (cos, sin))
        if plant.get("inverse"):
            sin = -sin
        return cos * (plant.get("without") != "cos"), sin * (plant.get("without") != "sin")

    if "most" in plant or "round" in plant:
        module.register_forward_pre_hook(places, with_kwargs=True)
    module.register_forward_hook(tables)
    if "pairing" in plant or "partial" in plant or "only" in plant:
        source = sys.modules[type(model).__module__]
        source.apply_rotary_pos_emb = _rotation(source.apply_rotary_pos_emb, plant)


def _rotation(original: Callable[..., Any], plant: Plant) -> Callable[..., Any]:
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **more: Any) -> Any:
        if "partial" in plant:
            n = plant["partial"]
            half = n // 2
            table = [torch.cat([x[..., :half], x[..., :half]], -1) for x in (cos, sin)]
            turned = original(q[..., :n], k[..., :n], *table, *rest, **more)
            return tuple(torch.cat([t, x[..., n:]], -1) for t, x in zip(turned, (q, k), strict=True))
        if "pairing" in plant:
            half = cos.shape[-1] // 2
            wide = [x[..., :half].repeat_interleave(2, -1).unsqueeze(1) for x in (cos, sin)]
            partner = _every_two if plant["pairing"] == "adjacent" else _other_half
            return tuple(x * wide[0] + partner(x) * wide[1] for x in (q, k))
        turned = original(q, k, cos, sin, *rest, **more)
        return (turned[0], k) if plant["only"] == "q" else (q, turned[1])

    return rotate


def _other_half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def _every_two(x: Tensor) -> Tensor:
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


def change_alibi(model: nn.Module, plant: Plant) -> None:
    """The bias that BLOOM's blocks are handed: multiplied, its heads rolled, in a narrow dtype (`round`); with `decoded`, only
    beside a cache."""

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        if plant.get("decoded") and args[0].shape[1] > 1:
            return None
        bias = kwargs["alibi"].unflatten(0, (args[0].shape[0], -1))  # [b head 1 key]
        bias = bias.roll(plant.get("roll", 0), 1) * plant.get("times", 1.0)
        bias = bias.to(DTYPES[plant["round"]]).to(bias.dtype) if "round" in plant else bias
        return args, {**kwargs, "alibi": bias.flatten(0, 1)}

    for module in _modules(model, plant):
        module.register_forward_pre_hook(before, with_kwargs=True)


def _elsewhere(ids: Tensor, plant: Plant) -> Tensor:
    """Positions, at most `most`, and as a narrow dtype holds them (`round`)."""
    ids = ids.clamp_max(plant.get("most", sys.maxsize))
    return ids.to(DTYPES[plant["round"]]).long() if "round" in plant else ids


def change_positions(model: nn.Module, plant: Plant) -> None:
    """Position ids shifted, counted from the padding, at most a number, or in a narrow dtype (`round`); with `decoded`, only those
    of tokens decoded from the cache."""

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        tokens = kwargs.get("input_ids", args[0] if args else None)
        own = kwargs.get("position_ids")
        cache = kwargs.get("past_key_values")
        past = 0 if cache is None else cache.get_seq_length()
        if plant.get("decoded") and not past:
            return None
        usual = torch.arange(past, past + tokens.shape[1], device=tokens.device).expand(tokens.shape)
        if "value" in plant:
            return args, {**kwargs, "position_ids": torch.full_like(usual, plant["value"])}
        ids = usual if own is None or plant.get("from_padding") else own
        return args, {**kwargs, "position_ids": _elsewhere(ids + plant.get("shift", 0), plant)}

    model.register_forward_pre_hook(before, with_kwargs=True)


def make_parallel(model: nn.Module, plant: Plant) -> None:
    """The MLP's norm reads the block's input instead of the stream after attention."""
    for name in _names(model, plant["block"], plant.get("layers")):
        block, kept = model.get_submodule(name), {}
        block.register_forward_pre_hook(lambda _, args, kept=kept: kept.update(x=args[0]))
        norm = block.get_submodule(plant["norm"])
        norm.register_forward_pre_hook(lambda _, args, kept=kept: (kept["x"], *args[1:]))


def share_norm(model: nn.Module, plant: Plant) -> None:
    """The MLP reads the output of the norm that attention reads."""
    for name in _names(model, plant["block"], plant.get("layers")):
        block, kept = model.get_submodule(name), {}
        block.get_submodule(plant["norm"]).register_forward_hook(lambda _, args, out, kept=kept: kept.update(x=out))
        block.get_submodule(plant["mlp"]).register_forward_pre_hook(lambda _, args, kept=kept: (kept["x"], *args[1:]))


def skip_module(model: nn.Module, plant: Plant) -> None:
    """Modules return their input."""
    for module in _modules(model, plant):
        module.forward = lambda x, *_, **__: x  # type: ignore[method-assign]


def run_twice(model: nn.Module, plant: Plant) -> None:
    """Blocks work on what they made of the stream, inside one call; the first of the two runs keeps nothing in a cache."""

    def forward(x: Tensor, *rest: Any, once: Callable[..., Any], **more: Any) -> Any:
        made = once(
            x, *(_without_cache(arg) for arg in rest), **{key: _without_cache(arg) for key, arg in more.items()}
        )
        return once(made[0] if isinstance(made, tuple) else made, *rest, **more)

    for module in _modules(model, plant):
        module.forward = functools.partial(forward, once=module.forward)  # type: ignore[method-assign]


def _without_cache(argument: Any) -> Any:
    return None if isinstance(argument, transformers.Cache) else argument


def edit_bias(model: nn.Module, plant: Plant) -> None:
    """A bias is dropped, doubled, or added where there is none."""
    for module in _modules(model, plant):
        bias = getattr(module, "bias", None)
        if plant["do"] == "drop":
            module.bias = None
        elif bias is not None:
            with torch.no_grad():
                bias.mul_(plant.get("by", 2.0))
        else:
            size = module.weight.shape[0]
            generator = torch.Generator().manual_seed(11)
            module.bias = nn.Parameter(plant["by"] * torch.randn(size, generator=generator))


def set_norm_eps(model: nn.Module, plant: Plant) -> None:
    """The eps of norms, whatever their class calls it. One that is written into the code of a layer norm is given another code."""
    for module in _modules(model, plant):
        held = _eps_of(module)
        if not hasattr(module, held):
            module.forward = _norm(module, {"kind": "layer"})  # type: ignore[method-assign]
        setattr(module, held, plant["value"])


def change_embedding(model: nn.Module, plant: Plant) -> None:
    """What the token embedding returns."""
    model.get_input_embeddings().register_forward_hook(lambda _, args, out: _changed(out, plant, args))  # type: ignore[operator]


def change_unembedding(model: nn.Module, plant: Plant) -> None:
    """What the unembedding returns."""
    model.get_output_embeddings().register_forward_hook(lambda _, args, out: _changed(out, plant, args))  # type: ignore[operator]


def low_head(model: nn.Module, plant: Plant) -> None:
    """The unembedding multiplied in a low dtype."""
    dtype = DTYPES[plant["dtype"]]
    if hasattr(model, "unembed"):  # HookedTransformer: W_U [d_model d_vocab]
        of = model.unembed
        of.register_forward_hook(
            lambda _, args, out: (args[0].to(dtype) @ of.W_U.to(dtype) + of.b_U.to(dtype)).to(out.dtype)
        )
        return
    head = model.get_output_embeddings()  # type: ignore[operator]

    def low(_: nn.Module, args: Any, out: Tensor) -> Tensor:
        bias = None if head.bias is None else head.bias.to(dtype)
        return F.linear(args[0].to(dtype), head.weight.to(dtype), bias).to(out.dtype)

    head.register_forward_hook(low)


def cast_everything(model: nn.Module, plant: Plant) -> None:
    """The whole model in a low dtype; its logits come back as they were asked for."""
    before = next(model.parameters()).dtype
    model.to(DTYPES[plant["dtype"]])
    model.get_output_embeddings().register_forward_hook(lambda _, args, out: out.to(before))  # type: ignore[operator]


def autocast(model: nn.Module, plant: Plant) -> None:
    """Products of matrices in a low dtype, as with mixed precision; logits come back as they were asked for."""
    forward, before = model.forward, next(model.parameters()).dtype

    @functools.wraps(forward)
    def run(*args: Any, **more: Any) -> Any:
        with torch.autocast("cpu", dtype=DTYPES[plant["dtype"]]):
            return forward(*args, **more)

    model.forward = run  # type: ignore[method-assign]
    model.get_output_embeddings().register_forward_hook(lambda _, args, out: out.to(before))  # type: ignore[operator]


def use_einsum(model: nn.Module, plant: Plant) -> None:
    """Every matrix product by another kernel: the same function, rounded otherwise."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.forward = lambda x, m=module: (
                torch.einsum("...i,oi->...o", x, m.weight.clone())
                + (  # type: ignore[method-assign, misc]
                    0.0 if m.bias is None else m.bias
                )
            )
        elif type(module).__name__ == "Conv1D":
            module.forward = lambda x, m=module: torch.einsum("...i,io->...o", x, m.weight) + m.bias  # type: ignore[method-assign, misc]


def change_router(model: nn.Module, plant: Plant) -> None:
    """Routers `(logits, weights, chosen)` that score, choose, divide, scale or round otherwise."""

    def hook(own: nn.Module, args: Any, out: Any) -> Any:
        return (
            _biased(own, *out) if plant.get("biased") else _routed(out, plant, getattr(own, "per_expert_scale", None))
        )

    for module in _modules(model, plant):
        module.register_forward_hook(hook)


def _biased(gate: Any, logits: Tensor, weights: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The bias that DeepSeek-V3 chooses by is in the weights, too."""
    scored = logits.sigmoid().gather(-1, chosen) + gate.e_score_correction_bias[chosen]
    return logits, scored / scored.sum(-1, keepdim=True) * gate.routed_scaling_factor, chosen


def _routed(out: tuple[Tensor, Tensor, Tensor], plant: Plant, factors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """`factors` of the experts `[expert]`: a router that has them (Gemma 4) returns probabilities in the place of logits."""
    logits, weights, chosen = out
    logits = logits if factors is None else logits.log()
    low = DTYPES[plant["dtype"]] if "dtype" in plant else logits.dtype
    asked = logits.to(low) / plant.get("temperature", 1.0)
    count = plant.get("top_k", chosen.shape[-1])
    chosen = (asked.roll(plant["roll"], -1) if "roll" in plant else asked).topk(count, -1).indices
    scores = {"sigmoid": asked.sigmoid, "raw": asked.clone}.get(plant.get("score", ""), lambda: asked.softmax(-1))()
    kept = scores.gather(-1, chosen)
    if plant.get("equal"):
        kept = torch.ones_like(kept) / count
    elif plant.get("renormalise", True):
        kept = kept / kept.sum(-1, keepdim=True)
    if factors is not None and plant.get("factors", True):
        kept = kept * factors[chosen]
    return out[0], (kept * plant.get("times", 1.0)).to(weights.dtype), chosen


def change_delta_rule(model: nn.Module, plant: Plant) -> None:
    """Linear attentions (`linear_attn` of Qwen3-Next) that compute another rule: see `_read_states` and `_convolve`."""
    for module in _modules(model, plant):
        names = vars(sys.modules[type(module).__module__])
        module.forward = functools.partial(_with_other_rule, module.forward, names, plant)  # type: ignore[method-assign]


def _with_other_rule(forward: Callable[..., Any], names: dict[str, Any], plant: Plant, *args: Any, **more: Any) -> Any:
    rule, convolve, step = "torch_chunk_gated_delta_rule", "causal_conv1d_fn", forward.__self__.dt_bias  # type: ignore[attr-defined]
    kept, bias = {name: names[name] for name in (rule, convolve)}, step.data
    names[rule] = functools.partial(_read_states, kept[rule], plant)
    names[convolve] = functools.partial(_convolve, kept[convolve], plant)
    step.data = bias * plant.get("step_bias", 1.0)
    try:
        return forward(*args, **more)
    finally:
        names.update(kept)
        step.data = bias


def _convolve(original: Callable[..., Any], plant: Plant, x: Tensor, weight: Tensor, *args: Any, **more: Any) -> Any:
    """`reversed`: the first weight is that of the token itself."""
    return original(x, weight.flip(-1) if plant.get("reversed") else weight, *args, **more)


def _read_states(
    original: Callable[..., Any], plant: Plant, query: Tensor, key: Tensor, value: Tensor, **more: Any
) -> Any:
    """length_eps, as_long (which of q and k keep their length), times (of queries), correction (of its share), decay (none), correct
    (false: the state is only added to), chunk (of so many tokens, each from a state of zeros)."""
    squares, as_long = plant.get("length_eps", 1e-6), plant.get("as_long", "")
    query, key = (
        x if name in as_long else x * torch.rsqrt(x.square().sum(-1, keepdim=True) + squares)
        for name, x in (("q", query), ("k", key))
    )
    more["g"] = more["g"] * 0 if plant.get("decay") is False else more["g"]
    more["beta"] = more["beta"] * plant.get("correction", 1.0)
    more["use_qk_l2norm_in_kernel"] = False
    query = query * plant.get("times", 1.0)
    if "chunk" in plant:
        gates = {name: more.pop(name).split(plant["chunk"], 1) for name in ("g", "beta")}
        parts = [x.split(plant["chunk"], 1) for x in (query, key, value)]
        made = [original(*part, g=g, beta=beta, **more) for *part, g, beta in zip(*parts, *gates.values(), strict=True)]
        return torch.cat([read for read, _ in made], 1), made[-1][1]
    if plant.get("correct", True):
        return original(query, key, value, **more)
    state = torch.zeros(*key.shape[:1], *key.shape[2:], value.shape[-1])
    read = []
    for at in range(key.shape[1]):
        state = state * more["g"][:, at].exp()[..., None, None]
        state = state + key[:, at, :, :, None] * (value[:, at] * more["beta"][:, at, :, None])[:, :, None]
        read.append((state * query[:, at, :, :, None]).sum(-2) * key.shape[-1] ** -0.5)
    return torch.stack(read, 1), state


def gate_before_norm(model: nn.Module, plant: Plant) -> None:
    """Norms with a gate apply it first."""

    def forward(module: nn.Module, x: Tensor, gate: Tensor) -> Tensor:
        y = x * F.silu(gate)
        return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + module.variance_epsilon) * module.weight

    for module in _modules(model, plant):
        module.forward = functools.partial(forward, module)  # type: ignore[method-assign]


def shift_own_embeddings(model: Any, plant: Plant) -> None:
    """Blocks are given the embeddings of the one `by` further on, as where a stage of a pipeline counts its own blocks."""
    given = model.model.project_per_layer_inputs
    model.model.project_per_layer_inputs = lambda *args, **more: given(*args, **more).roll(-plant["by"], -2)


OPERATIONS: dict[str, Callable[[nn.Module, Plant], None]] = {
    "set": set_attribute,
    "output": change_output,
    "input": change_input,
    "weight": change_weight,
    "norm": replace_norm,
    "activation": replace_activation,
    "attention": change_attention,
    "hooked_window": narrow_hooked,
    "rotary": change_rotary,
    "positions": change_positions,
    "alibi": change_alibi,
    "parallel": make_parallel,
    "share_norm": share_norm,
    "skip": skip_module,
    "twice": run_twice,
    "bias": edit_bias,
    "norm_eps": set_norm_eps,
    "embedding": change_embedding,
    "unembedding": change_unembedding,
    "router": change_router,
    "low_head": low_head,
    "cast": cast_everything,
    "autocast": autocast,
    "einsum": use_einsum,
    "delta_rule": change_delta_rule,
    "gate_first": gate_before_norm,
    "own_embeddings": shift_own_embeddings,
}
