"""For which numbers kernels are compiled anew, read from the source of every kernel."""

import ast
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "kernels"
KERNELS = {
    f"{path.relative_to(FOLDER)}, {node.name}": node
    for path in sorted(FOLDER.rglob("*.py"))
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
}


def parameters(kernel: ast.FunctionDef) -> set[str]:
    return {parameter.arg for parameter in kernel.args.args}


def not_specialized(kernel: ast.FunctionDef) -> set[str]:
    calls = (x for x in kernel.decorator_list if isinstance(x, ast.Call))
    keywords = (keyword for call in calls for keyword in call.keywords)
    lists = (x.value for x in keywords if x.arg == "do_not_specialize")
    return {name for names in lists for name in ast.literal_eval(names)}


def test_each_name_is_that_of_a_parameter() -> None:
    """Triton passes over others, and compiles for each kind of number that is meant."""
    unknown = {name: not_specialized(x) - parameters(x) for name, x in KERNELS.items()}
    assert {name: wrong for name, wrong in unknown.items() if wrong} == {}


def test_no_kernel_is_compiled_for_a_number_of_tokens() -> None:
    of_tokens = {name: x for name, x in KERNELS.items() if "T" in parameters(x)}
    assert len(of_tokens) > 30
    assert [name for name, x in of_tokens.items() if "T" not in not_specialized(x)] == []
