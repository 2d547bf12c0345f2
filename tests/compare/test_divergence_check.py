"""Implementations of the generalized Jensen-Shannon divergence as people write them, and what is said of each."""

import math

import pytest
import torch
import torch.nn.functional as F

from parity_audit.compare.divergence_check import check_divergence


def right_loss(student_logits, teacher_logits, beta=0.5, temperature=1.0, reduction="batchmean"):
    """As a training library has it today: logits, student first, summed over tokens and divided by the batch of one."""
    student, teacher = (F.log_softmax(x / temperature, dim=-1) for x in (student_logits, teacher_logits))
    mixture = torch.logsumexp(torch.stack([student + math.log1p(-beta), teacher + math.log(beta)]), 0)
    ours = F.kl_div(mixture, teacher, reduction="none", log_target=True)
    theirs = F.kl_div(mixture, student, reduction="none", log_target=True)
    loss = beta * ours + (1 - beta) * theirs
    return loss.sum() / loss.shape[0] if reduction == "batchmean" else loss


def log_mixture_loss(student_logits, teacher_logits, beta=0.5):
    student, teacher = (F.log_softmax(x, dim=-1) for x in (student_logits, teacher_logits))
    mixture = beta * teacher + (1 - beta) * student
    parts = [F.kl_div(mixture, side, reduction="sum", log_target=True) for side in (teacher, student)]
    return beta * parts[0] + (1 - beta) * parts[1]


def swapped_loss(student_logits, teacher_logits, beta=0.5):
    student, teacher = (F.log_softmax(x, dim=-1) for x in (student_logits, teacher_logits))
    mixture = torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
    parts = [F.kl_div(mixture, side, reduction="sum", log_target=True) for side in (teacher, student)]
    return (1 - beta) * parts[0] + beta * parts[1]


def of_probabilities(a, b, weight):
    """Unnamed order, probabilities, one value per position: the right formula with a as the teacher."""
    m = weight * a + (1 - weight) * b
    return weight * (a * (a / m).log()).sum(-1) + (1 - weight) * (b * (b / m).log()).sum(-1)


def teacher_kl(teacher_logprobs, student_logprobs, beta):
    return F.kl_div(student_logprobs, teacher_logprobs, reduction="sum", log_target=True)


@pytest.mark.parametrize(
    ("function", "start"),
    [
        (right_loss, "the generalized"),
        (of_probabilities, "the generalized"),
        (log_mixture_loss, "log-mixture"),
        (swapped_loss, "swapped weights"),
        (teacher_kl, "KL(teacher || student)"),
    ],
)
def test_each_implementation_is_told_from_the_others(function, start):
    found = check_divergence(function)

    assert (found.computes or found.problem).startswith(start)
    assert found.right == (start == "the generalized")


def test_how_it_wants_to_be_called_is_said():
    found = check_divergence(of_probabilities)
    assert (found.inputs, found.reduction) == ("probabilities", "one value per position")


def test_float32_is_good_enough():
    found = check_divergence(right_loss)
    assert found.worst < 1e-5


def test_values_of_no_known_formula_are_not_called_right():
    found = check_divergence(lambda p, q, beta: beta * (p - q).square().sum())
    assert found.computes is None
    assert "no known formula" in found.problem


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda p, q, beta: torch.tensor(math.nan), "not finite"),
        (lambda p, q, beta: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_function_that_breaks_is_reported_with_its_own_error(function, problem):
    found = check_divergence(function)
    assert found.computes is None
    assert problem in found.problem
