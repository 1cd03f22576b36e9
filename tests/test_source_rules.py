"""Rules that every source file keeps: nothing runs code from data, and nothing outgrows one screenful of attention."""

import ast
from collections.abc import Callable

import pytest

from tests.source_tree import ROOT, scanned_files

FILES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in scanned_files()}
UNPICKLERS = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}


def keyword(call: ast.Call, name: str) -> object:
    return next((ast.unparse(word.value) for word in call.keywords if word.arg == name), None)


def unpickles(call: ast.Call) -> bool:
    module, _, function = ast.unparse(call.func).rpartition(".")
    return module in UNPICKLERS and function in ("load", "loads", "open", "Unpickler")


def loads_torch_code(call: ast.Call) -> bool:
    return ast.unparse(call.func) == "torch.load" and keyword(call, "weights_only") != "True"


def loads_numpy_objects(call: ast.Call) -> bool:
    return keyword(call, "allow_pickle") not in (None, "False")


def loads_yaml_objects(call: ast.Call) -> bool:
    return ast.unparse(call.func) in ("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load")


def evaluates_text(call: ast.Call) -> bool:
    return ast.unparse(call.func) in ("eval", "exec", "builtins.eval", "builtins.exec", "os.system")


def runs_a_shell(call: ast.Call) -> bool:
    return keyword(call, "shell") not in (None, "False")


def trusts_remote_code(call: ast.Call) -> bool:
    return keyword(call, "trust_remote_code") == "True"


RULES: list[Callable[[ast.Call], bool]] = [
    unpickles,
    loads_torch_code,
    loads_numpy_objects,
    loads_yaml_objects,
    evaluates_text,
    runs_a_shell,
    trusts_remote_code,
]


def offences(source: str) -> list[str]:
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [f"line {call.lineno}: {rule.__name__}" for call in calls for rule in RULES if rule(call)]


def test_no_file_runs_code_from_data():
    assert [f"{name} {offence}" for name, source in FILES.items() for offence in offences(source)] == []


@pytest.mark.parametrize(
    "line",
    [
        "pickle.loads(data)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text, Loader=yaml.Loader)",
        "eval(text)",
        "exec(text)",
        "subprocess.run(command, shell=True)",
        "Model.from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_the_rules_see_each_way_to_run_code(line):
    assert len(offences(line)) == 1


def test_the_rules_allow_the_safe_forms():
    assert not offences("torch.load(path, weights_only=True); model.eval(); yaml.safe_load(text); json.loads(text)")


def test_files_stay_under_600_lines_and_functions_under_100():
    functions = [
        (f"{name}:{node.lineno} {node.name}", (node.end_lineno or node.lineno) - node.lineno + 1)
        for name, source in FILES.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert [name for name, source in FILES.items() if source.count("\n") > 600] == []
    assert [name for name, lines in functions if lines > 100] == []


def test_code_is_ascii():
    assert [name for name, source in FILES.items() if not source.isascii()] == []


def test_every_package_has_a_page():
    rooms = sorted(path.parent for path in (ROOT / "unirl").glob("*/__init__.py"))
    without = [str(room.relative_to(ROOT)) for room in rooms if not (room / "README.md").is_file()]
    assert not without, f"write the one-page README.md (the contract) of {without}"
