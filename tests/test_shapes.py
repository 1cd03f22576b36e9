"""Public functions on tensors say their shapes, and a call with other shapes fails under pytest."""

import ast
import re

import pytest
import torch
from beartype.roar import BeartypeCallHintViolation

from tests.shapes import ANNOTATED, DTYPES, checked, unchecked
from tests.source_tree import Module, modules
from unirl.algorithms.shared.surrogate import mean_metric
from unirl.models.language.sampling import sample_tokens
from unirl.sde.gaussian import Gaussian
from unirl.sde.kernels import EulerODE
from unirl.types.sampling import ARSamplingParams

Float = DTYPES["Float"]  # for an annotation below
SHAPE = re.compile(rf"\b(?:{'|'.join(DTYPES)})\[Tensor, '[^']*'\]")


def hints_without_shape(module: Module) -> list[str]:
    """`function: annotation` of each public function of the module that mentions a Tensor without its shape."""
    classes = [node for node in module.tree.body if isinstance(node, ast.ClassDef) and is_public(node.name)]
    nodes = [node for owner in (module.tree, *classes) for node in owner.body]
    return [
        f"{module.name}.{function.name}: {hint}"
        for function in nodes
        if isinstance(function, ast.FunctionDef) and is_public(function.name)
        for hint in hints_of(function)
        if re.search(r"\bTensor\b", SHAPE.sub("", hint))
    ]


def is_public(name: str) -> bool:
    return not name.startswith("_") or name.endswith("__")


def hints_of(function: ast.FunctionDef) -> list[str]:
    """The annotations of a function; those of a Callable say nothing about the function's own tensors."""
    args = function.args
    nodes = [arg.annotation for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg) if arg]
    hints = [ast.unparse(node) for node in (*nodes, function.returns) if node is not None]
    return [hint for hint in hints if "Callable" not in hint]


@pytest.mark.parametrize("package", ANNOTATED)
def test_public_functions_name_the_shape_of_every_tensor(package):
    inside = [module for name, module in modules().items() if f"{name}.".startswith(f"{package}.")]
    assert inside
    assert [hint for module in inside for hint in hints_without_shape(module)] == []


def test_an_argument_of_another_shape_is_refused():
    gaussian = Gaussian(torch.zeros(3, 4), torch.ones(3))
    with pytest.raises(BeartypeCallHintViolation, match="parameter x_next"):
        gaussian.log_prob(torch.tensor(0.0))


def test_a_letter_means_one_size_within_a_call():
    with pytest.raises(BeartypeCallHintViolation, match="parameter v"):
        EulerODE().transition(torch.zeros(3, 4), torch.zeros(2, 4), 0.5, 0.1)


def test_our_own_error_is_what_a_user_sees():
    with unchecked(), pytest.raises(ValueError, match="must have the same shape"):
        EulerODE().transition(torch.zeros(3, 4), torch.zeros(2, 4), 0.5, 0.1)


def test_sampling_needs_one_uniform_number_per_slot():
    with pytest.raises(BeartypeCallHintViolation, match="parameter uniform"):
        sample_tokens(torch.zeros(3, 4), torch.zeros(2), ARSamplingParams())


def test_a_function_behind_no_grad_is_checked():
    with pytest.raises(BeartypeCallHintViolation, match="parameter weights"):
        mean_metric(torch.zeros(3), torch.ones(2))


def test_a_result_of_another_shape_is_refused_although_such_arguments_were_accepted_before():
    def positive(x):
        return x[x > 0]

    positive.__annotations__ = dict.fromkeys(("x", "return"), "Float[torch.Tensor, 'N']")
    function = checked(positive)
    for _ in range(2):
        assert function(torch.ones(3)).shape == (3,)
    with pytest.raises(BeartypeCallHintViolation, match="return"):
        function(torch.tensor([1.0, -1.0, 1.0]))
