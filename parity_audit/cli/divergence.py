"""`parity-audit check-divergence`: parse, ask, print."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from parity_audit.cli.errors import guarded
from parity_audit.core.errors import EXIT_MISMATCH, EXIT_OK


@guarded
def check_divergence(
    function: Annotated[str, typer.Argument(help="FILE:FUNCTION, called as f(teacher, student, beta).")],
) -> int:
    """Is your function the generalized Jensen-Shannon divergence, or one of its well-known look-alikes?"""
    from parity_audit import api

    found = api.check_divergence(function)
    console = Console(markup=False, highlight=False)
    if found.computes is None:
        console.print(f"no known divergence: {found.problem} (nearest is {found.worst:.2g} off)")
        return EXIT_MISMATCH
    console.print(f"{'right' if found.right else 'not the generalized Jensen-Shannon divergence'}: {found.computes}")
    console.print(f"called with {found.inputs}, in the order {found.order}; it returns {found.reduction}")
    console.print(
        f"largest relative deviation {found.worst:.2g} at beta {', '.join(f'{beta:g}' for beta, _ in found.values)}"
    )
    return EXIT_OK if found.right else EXIT_MISMATCH
