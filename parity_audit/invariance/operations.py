"""Find the operations whose result depends on the number of rows, and the numbers of rows at which their kernel changes."""

from __future__ import annotations

from parity_audit.capture.session import Session
from parity_audit.compare.floor import dtype_eps
from parity_audit.core.errors import BackendFailed
from parity_audit.core.invariance_report import OperationClasses
from parity_audit.core.operations import KEYS, Operation, OperationsRequest
from parity_audit.core.sites import local_name
from parity_audit.core.types import NotTested
from parity_audit.invariance.classes import classes_of, size_words, switches
from parity_audit.invariance.conditions import Condition

COMPONENTS = {
    "z": "the attention",
    "q": "the projection",
    "k": "the projection",
    "v": "the projection",
    "logits": "the head",
}
"""The component that computes a site, for sites whose name does not say it."""


def operation_classes(
    session: Session, alone: Condition, sizes: tuple[int, ...], dtype: str
) -> tuple[tuple[OperationClasses, ...], tuple[NotTested, ...]]:
    """Run every operation of the model on the subject's own activations with different numbers of rows.

    Return the operations in the order in which the model runs them, each with its classes of sizes with equal bits, and the
    operations that could not be tested.
    """
    try:
        reply = session.operations(OperationsRequest(probe=alone.probe, sizes=sizes))
    except BackendFailed as error:
        return (), (NotTested(what="operations", why=error.message),)
    return tuple(_classes(one, dtype) for one in reply.operations), reply.not_tested


def _classes(operation: Operation, dtype: str) -> OperationClasses:
    names = [str(size) for size in operation.sizes]
    return OperationClasses(
        name=operation.name, kind=operation.kind, shape=operation.shape, varied=operation.varied,
        words=size_words(classes_of(names, operation.hashes)), switches=switches(operation.sizes, operation.hashes),
        ulp=operation.relative / dtype_eps(dtype), like_it=operation.like_it,
    )  # fmt: skip


def first_operation(operations: tuple[OperationClasses, ...], first_site: str | None) -> str | None:
    """Return the first operation, in the order in which the model runs them, whose bits depend on the size.

    If none of the operations that can be run alone does, return the component that computes the first site that changes.
    Operations that vary only the number of parts in which attention reduces its keys are skipped: the kernel chooses that
    number itself, and it is no condition of a run.
    """
    switching = next((one.name for one in operations if one.switches and one.varied != KEYS), None)
    if switching is not None or first_site is None:
        return switching
    return f"{COMPONENTS.get(local_name(first_site), 'the component')} of {first_site}"
