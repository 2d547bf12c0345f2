"""Clean ports that compute by other routes, audited whole: no finding, and `parity` or `exact`, or the command fails.

    python benchmarks/clean_ports.py --model meta-llama/Llama-3.2-1B --only prescaled_q online_softmax

Two families: one decoder in plain torch with its route as a switch (tests/ports/routes.py: Llama, Gemma-2, Qwen-3), and
transformers models that a user has patched (tests/ports/patched.py, GPT-NeoX as well). Each is a candidate of its own.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import parity_audit
from parity_audit.core.report import Candidate, Verdict

ROOT = Path(__file__).parents[1]
PORTS = ROOT / "tests" / "ports"
PLAIN = ("meta-llama/Llama-3.2-1B", "google/gemma-2-2b-it", "Qwen/Qwen3-0.6B")
PATCHED = (*PLAIN, "EleutherAI/pythia-160m")
PROBES = ("short", "ragged", "left_padded", "decode")
AT_ONCE = 12
GATED_ONLY = "fused_mlp"


def backends(model: str, only: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(name, BACKEND string) of every port of a model."""
    sys.path.insert(0, str(ROOT))
    from tests.ports import patched, routes

    sites = PORTS / "routes_sites.yaml"
    ports = [
        (name, f"python:{PORTS}/routes.py:load,sites={sites},route={name}") for name in routes.ROUTES if model in PLAIN
    ]
    ports += [(f"hf {name}", f"python:{PORTS}/patched.py:load,patch={name}") for name in patched.NAMES]
    for name, backend in ports:
        gated = model in PLAIN or GATED_ONLY not in name
        if gated and (not only or name.removeprefix("hf ") in only):
            yield name, backend


def wrong(candidate: Candidate) -> bool:
    """Whether a clean port was accused."""
    return candidate.verdict not in (Verdict.EXACT, Verdict.PARITY) or bool(candidate.findings)


def main() -> int:
    """Print one line per port; 1 where a clean port was accused, or could not be judged."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=list(PATCHED), choices=PATCHED)
    parser.add_argument("--only", nargs="+", default=[], help="names of routes or patches")
    asked = parser.parse_args()
    accused = total = 0
    for model in asked.model:
        ports = list(backends(model, asked.only))
        for start in range(0, len(ports), AT_ONCE):
            group = ports[start : start + AT_ONCE]
            with tempfile.TemporaryDirectory() as out:
                report = parity_audit.audit(
                    model, candidates=[backend for _, backend in group], miniature="mini", probes=PROBES, repair=False,
                    out=Path(out),
                )  # fmt: skip
            for (name, _), candidate in zip(group, report.candidates, strict=True):
                total, accused = total + 1, accused + wrong(candidate)
                found = ", ".join(finding.knob for finding in candidate.findings)
                print(f"{model:28} {name:45} {candidate.verdict.value:12} {candidate.why} {found}", flush=True)
    print(f"{total} clean ports, {accused} accused")
    return int(accused > 0)


if __name__ == "__main__":
    sys.exit(main())
