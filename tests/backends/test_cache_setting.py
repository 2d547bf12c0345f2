"""Whether a whole run makes a cache, which some releases compute other keys without, is a setting of the candidate."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parity_audit.capture.probes import padded
from parity_audit.core.types import SiteTap
from parity_audit.core.wire import RunRequest


@pytest.mark.parametrize(
    ("settings", "made"), [({}, False), ({"use_cache": True}, True), ({"use_cache": False}, False)]
)
def test_a_run_makes_a_cache_where_the_settings_say_so(loaded, llama, tmp_path, settings, made):
    backend = loaded(llama)
    backend.request = replace(backend.request, settings=settings)
    caches = []
    backend.model.model.register_forward_hook(lambda *call: caches.append(call[2].past_key_values))
    tap = SiteTap(site="ln_final.out", module="model.norm")

    backend.run(RunRequest(probe=padded("short", "", [[1, 8, 9]]), taps=(tap,), out=str(tmp_path)), lambda *_: None)

    assert [cache is not None for cache in caches] == [made]
