"""How far a port is run: past its own limit where it accepts that, and what is said where it does not."""

from __future__ import annotations

import pytest

from parity_audit.backends.reach import PAST_IT_AT_MOST, run_as_far_as_it_goes
from parity_audit.core.types import Probe
from parity_audit.core.wire import RunReply, RunRequest


def asked(length, pad=0):
    mask = ((0,) * pad + (1,) * (length - pad),)
    probe = Probe(name="long", purpose="", token_ids=(tuple(range(length)),), mask=mask)
    return RunRequest(probe=probe, taps=(), out="")


def port(longest):
    """What lengths were tried of a port that raises beyond `longest`."""
    tried = []

    def run(request):
        tried.append(request.probe.shape[1])
        if tried[-1] > longest:
            raise IndexError(f"index {longest} is out of range\nmore")
        return RunReply(entries=())

    return run, tried


@pytest.mark.parametrize(
    ("length", "longest", "tried", "positions"),
    [
        (200, 1000, [200], None),  # within its limit
        (400, 1000, [400], None),  # past it, and it runs
        (600, 1000, [512], 512),  # twice its limit is far enough
        (400, 256, [400, 256], 256),  # it refuses
    ],
)
def test_a_port_runs_to_twice_its_limit_or_as_far_as_it_goes(length, longest, tried, positions):
    run, found = port(longest)
    reply = run_as_far_as_it_goes(asked(length), 256, run)

    assert (found, reply.positions) == (tried, positions)
    named = [gap.what for gap in reply.not_tested]
    assert named == ([] if positions is None else [f"positions {positions} to {length - 1} of probe long"])


def test_a_refusal_is_told_with_its_error():
    run, _ = port(256)
    (gap,) = run_as_far_as_it_goes(asked(400), 256, run).not_tested

    assert gap.why == "this port is made for 256 positions; it refuses more (IndexError: index 256 is out of range)"


def test_an_error_within_the_limit_is_an_error():
    run, _ = port(100)
    with pytest.raises(IndexError):
        run_as_far_as_it_goes(asked(400), 256, run)


def test_what_would_be_dear_is_not_tried():
    run, tried = port(10**6)
    run_as_far_as_it_goes(asked(4 * PAST_IT_AT_MOST), PAST_IT_AT_MOST, run)
    run_as_far_as_it_goes(asked(400), 256, run, past=False)

    assert tried == [PAST_IT_AT_MOST, 256]


def test_padding_on_the_left_has_no_beginning_to_run():
    run, tried = port(1000)
    reply = run_as_far_as_it_goes(asked(40, pad=9), 32, run)

    assert (tried, reply.entries) == ([], ())
    assert reply.not_tested[0].what == "probe long (40 positions)"
