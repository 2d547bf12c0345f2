"""Token by token from the cache, and joined again: the same tensors as one run, to rounding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from parity_audit.backends.decoding import says_no_cache
from parity_audit.capture.probes import padded, plan_probes
from parity_audit.core.types import NotTested, SiteTap
from parity_audit.core.wire import RunRequest

PROBE = next(probe for probe in plan_probes({"vocab_size": 515, "bos_token_id": 2}) if probe.decode_from)
LENGTH = len(PROBE.token_ids[0])
ATTENTION = "model.layers.2.self_attn"
TAPS = (
    SiteTap(site="logits", module="", take="output:0"),
    SiteTap(site="blocks.1.resid_pre", module="model.layers.1", take="input"),
    SiteTap(site="blocks.2.rot_k", module=ATTENTION, take="attention:key", layout="b head p d -> b p head d"),
)


@pytest.fixture(scope="module")
def backend(llama, loaded):
    return loaded(llama)


def run(backend, out, probe=PROBE, **more):
    reply = backend.run(RunRequest(probe=probe, taps=TAPS, out=str(out), **more), lambda text: None)
    return reply, {entry.site: load_file(out / entry.file)["x"] for entry in reply.entries}


def test_steps_joined_are_one_run(backend, tmp_path):
    lengths = []
    hook = backend.model.register_forward_pre_hook(
        lambda _, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    _, steps = run(backend, tmp_path / "steps", cached=True)
    hook.remove()
    _, whole = run(backend, tmp_path / "whole")

    assert lengths == [PROBE.decode_from, *[1] * (LENGTH - PROBE.decode_from)]
    assert steps.keys() == whole.keys() == {tap.site for tap in TAPS}
    for site in whole:
        assert steps[site].shape == whole[site].shape
        torch.testing.assert_close(steps[site], whole[site], rtol=1e-4, atol=1e-5)


def without_a_kernel() -> None:
    torch.ones(2, 2, dtype=torch.float16).det()


def refused_by_torch() -> None:
    torch.nn.Module()(3)


def refused() -> None:
    raise NotImplementedError("no keys in this port")


def test_a_prompt_that_goes_on_is_one_step_of_several_tokens(backend, tmp_path):
    lengths = []
    hook = backend.model.register_forward_pre_hook(
        lambda _, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    going_on = replace(PROBE, at_once=3)
    _, steps = run(backend, tmp_path / "steps", probe=going_on, cached=True)
    hook.remove()
    _, whole = run(backend, tmp_path / "whole")

    assert lengths == [PROBE.decode_from, 3, *[1] * (LENGTH - PROBE.decode_from - 3)]
    for site in whole:
        torch.testing.assert_close(steps[site], whole[site], rtol=1e-4, atol=1e-5)


def test_padded_rows_are_decoded_with_the_mask_of_all_tokens_so_far(backend, tmp_path):
    """What the rows are by themselves, without padding, they are side by side."""
    given = []
    hook = backend.model.register_forward_pre_hook(
        lambda _, args, kwargs: given.append((kwargs["attention_mask"], kwargs["position_ids"])), with_kwargs=True
    )
    rows = [list(range(3, 3 + LENGTH)), list(range(40, 36 + LENGTH))]
    batch = padded("decode", "test", rows, left=True, decode_from=PROBE.decode_from)
    _, steps = run(backend, tmp_path / "steps", probe=batch, cached=True)
    hook.remove()

    assert [mask.shape[1] for mask, _ in given] == list(range(PROBE.decode_from, LENGTH + 1))
    assert [at[:, -1].tolist() for _, at in given] == [[n, n - 4] for n in range(PROBE.decode_from - 1, LENGTH)]
    for number, row in enumerate(rows):
        _, alone = run(backend, tmp_path / str(number), probe=padded("decode", "test", [row]))
        for site, value in alone.items():
            torch.testing.assert_close(steps[site][number, -len(row) :], value[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("decoding", "said"), [(without_a_kernel, False), (refused_by_torch, False), (refused, True)])
def test_a_kernel_that_torch_lacks_is_not_a_program_without_a_cache(decoding, said):
    with pytest.raises(NotImplementedError) as caught:
        decoding()

    assert says_no_cache(caught.value) is said


@pytest.mark.parametrize(("error", "raised"), [(NotImplementedError, False), (IndexError, True)])
def test_a_program_that_cannot_go_on_says_why_and_an_error_is_told_from_having_no_cache(
    error, raised, backend, tmp_path, monkeypatch
):
    inner = backend.model.forward

    def forward(*args, past_key_values=None, **kwargs):
        if past_key_values is not None:
            raise error("no keys in this port")
        return inner(*args, **kwargs)

    monkeypatch.setattr(backend.model, "forward", forward)
    reply, seen = run(backend, tmp_path, cached=True)

    assert seen == {}
    what, why = "cached decoding (probe decode)", f"{error.__name__}: no keys in this port"
    assert reply.not_tested == (NotTested(what=what, why=why),)
    assert reply.raised == (f"{what}: {why}" if raised else "")
