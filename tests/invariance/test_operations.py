"""Operations of a small module with a known dependence on the number of rows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parity_audit.backends import positions
from parity_audit.backends.operations import operations, resized
from parity_audit.capture.probes import padded
from parity_audit.core.invariance_report import OperationClasses
from parity_audit.core.operations import BATCH, KEYS, QUERIES, ROWS, OperationsRequest
from parity_audit.invariance.classes import classes_of, size_words
from parity_audit.invariance.operations import first_operation

SIZES = (1, 2, 3, 4, 5, 7, 8, 9)
TOKENS, WIDTH, VOCAB = 6, 16, 32


class Switching(nn.Linear):
    """A linear layer that adds one unit in the last place from four rows on."""

    def forward(self, x):
        out = F.linear(x.double(), self.weight.double()).float()
        return torch.nextafter(out, torch.full_like(out, torch.inf)) if x.shape[-2] >= 4 else out


class Mixing(nn.Linear):
    """A layer whose rows depend on each other: no operation on rows."""

    def forward(self, x):
        return F.linear(x + x.mean(-2, keepdim=True), self.weight)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.switching, self.mixing = Switching(WIDTH, WIDTH, bias=False), Mixing(WIDTH, WIDTH, bias=False)
        self.twice = Switching(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.twice(self.switching(self.embed(tokens))) + self.mixing(self.embed(tokens))
        q = x[:, None].double()
        pattern = (q @ q.transpose(2, 3)).softmax(-1)
        return self.head((pattern @ q)[:, 0].float())


@pytest.fixture(scope="module")
def found():
    torch.manual_seed(0)
    model = Attending().eval()

    def run(request, tell):
        with torch.no_grad():
            model(positions.tokens(request.probe, "cpu"))

    probe = padded("subject", "", [list(range(TOKENS))])
    reply = operations(SimpleNamespace(model=model, run=run), OperationsRequest(probe=probe, sizes=SIZES), print)
    return reply.operations


def _words(operation):
    return size_words(classes_of([str(size) for size in operation.sizes], operation.hashes))


def test_the_size_at_which_a_kernel_switches_is_read_off(found):
    (switching,) = (one for one in found if one.kind == "Switching")

    assert (switching.name, switching.varied, switching.like_it) == ("switching", ROWS, 1)
    assert _words(switching) == "{1-3} {>=4}"
    assert 0 < switching.relative < 2**-22


def test_operations_stand_in_the_order_of_the_data_and_mixed_rows_are_left_out(found):
    names = list(dict.fromkeys(one.name for one in found))

    assert names[:2] == ["switching", "head"]
    assert "mixing" not in names
    assert "log_softmax" in names


def test_attention_is_varied_by_queries_sequences_and_parts_of_the_keys(found):
    attention = {(one.name.split(" (")[0], one.varied) for one in found if one.name.startswith("attention")}

    assert attention == {
        ("attention scores", QUERIES), ("attention scores", BATCH), ("attention pattern", QUERIES),
        ("attention pattern", BATCH), ("attention values", QUERIES), ("attention values", BATCH), ("attention values", KEYS),
    }  # fmt: skip


def test_the_followed_row_stands_first_whatever_the_size():
    rows = torch.arange(12.0).reshape(1, 4, 3)

    assert resized(rows, 1, 4)[0, 0].tolist() == rows[0, 3].tolist()
    assert resized(rows, 9, 4)[0, :, 0].tolist() == [9.0, 0.0, 3.0, 6.0, 9.0, 0.0, 3.0, 6.0, 9.0]
    assert resized(rows[0], 2, 4)[:, 0].tolist() == [9.0, 0.0]


def _classes(name, varied, *switched):
    return OperationClasses(name=name, kind="torch", shape="", varied=varied, words="", switches=switched, ulp=0.0)


@pytest.mark.parametrize(
    ("operations", "site", "named"),
    [
        ((_classes("norm", ROWS), _classes("q_proj", ROWS, 2), _classes("head", ROWS, 4)), "blocks.0.q", "q_proj"),
        ((_classes("values", KEYS, 2), _classes("head", ROWS)), None, None),
        ((_classes("values", KEYS, 2),), "blocks.1.z", "the attention of blocks.1.z"),
        ((), "blocks.0.mlp_out", "the component of blocks.0.mlp_out"),
    ],
)
def test_the_first_operation_is_one_whose_kernel_a_condition_can_switch(operations, site, named):
    assert first_operation(operations, site) == named
