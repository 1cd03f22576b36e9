"""Rules that every source file keeps.

Nothing runs code from data, nothing reads from outside without an end, and nothing outgrows one screenful of attention.
"""

import ast
from collections.abc import Callable, Sequence

import pytest

from tests.source_tree import PACKAGES, ROOT, scanned_files

FILES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in scanned_files()}
UNPICKLERS = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
READERS = {"read", "readline", "readlines", "readall", "read_bytes", "body", "form", "json", "aread", "recv"}
"""Calls that read to the end when they are not told how much. `read_text` is for files that the user wrote."""
UNPICKLES = {"unirl/distributed/group/torchrun.py": "calls and results of the ranks of one run, which prove a secret"}
"""The file that may unpickle, once, and what that is. Ray does the same between its workers."""
ENDS_BY_ITSELF = {
    "unirl/data/readers.py": "a prompt file that the user named",
    "unirl/distributed/group/reaper.py": "a pipe on which nothing is sent; its end is the signal",
    "unirl/media/process.py": "a file that its parent process has read within a bound",
    "unirl/tracking/tables.py": "a table that this run wrote",
    "unirl/train/backend/manifest.py": "a manifest that a run wrote",
    "unirl/viewer/app.py": "the files of the front end, which are part of the package",
}
"""Files that may read one thing whole, and what that is."""


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


Rule = Callable[[ast.Call], bool]
RULES: list[Rule] = [
    unpickles,
    loads_torch_code,
    loads_numpy_objects,
    loads_yaml_objects,
    evaluates_text,
    runs_a_shell,
    trusts_remote_code,
]


def reads_without_end(call: ast.Call) -> bool:
    told_how_much = call.args or call.keywords
    return isinstance(call.func, ast.Attribute) and call.func.attr in READERS and not told_how_much


def offences(source: str, rules: Sequence[Rule] = RULES) -> list[str]:
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [f"line {call.lineno}: {rule.__name__}" for call in calls for rule in rules if rule(call)]


def test_both_packages_the_scripts_and_the_benchmarks_are_read():
    service = {f"unirl-reward-service/reward_service/{name}.py" for name in ("app", "decoder", "worker")}
    assert service | {"unirl/reward/client/wire.py", "scripts/toy_cards.py", "benchmarks/rewards.py"} <= FILES.keys()


def test_no_file_runs_code_from_data():
    found = {name: offences(source) for name, source in FILES.items()}
    assert {name: each for name, each in found.items() if each and name not in UNPICKLES} == {}
    assert [len(found[name]) for name in UNPICKLES] == [1]


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


def test_no_package_reads_without_an_end():
    result = {
        name: offences(source, [reads_without_end]) for name, source in FILES.items() if name.startswith(PACKAGES)
    }
    assert {name for name, reads in result.items() if reads} == ENDS_BY_ITSELF.keys()
    assert max(map(len, result.values())) == 1


@pytest.mark.parametrize("line", ["await request.body()", "file.read()", "response.json()", "Path(p).read_bytes()"])
def test_the_rule_sees_a_read_without_an_end(line):
    assert len(offences(f"async def f():\n    {line}", [reads_without_end])) == 1


def test_the_rule_allows_a_read_that_is_told_how_much():
    assert not offences("file.read(10); file.read(limit + 1); msgspec.json.decode(body)", [reads_without_end])


KNOWS_CUDA = "unirl/types/device.py"
"""The only file of the package that may ask for CUDA by name."""


def names_cuda(node: ast.AST) -> bool:
    """True for `torch.cuda`, `torch.accelerator`, `torch.device("cuda")`, `.is_cuda` and comparisons with "cuda"."""
    if isinstance(node, ast.Attribute):
        return node.attr == "is_cuda" or ast.unparse(node) in ("torch.cuda", "torch.accelerator", "torch.version.cuda")
    inputs = {ast.Compare: lambda: node.comparators, ast.Call: lambda: node.args}.get(type(node), list)()
    return any(isinstance(value, ast.Constant) and value.value == "cuda" for value in inputs)


def test_one_module_of_the_package_names_cuda():
    result = {
        name
        for name, source in FILES.items()
        if name.startswith("unirl/") and any(map(names_cuda, ast.walk(ast.parse(source))))
    }
    assert result == {KNOWS_CUDA}


@pytest.mark.parametrize(
    "line",
    [
        "torch.cuda.synchronize()",
        "torch.accelerator.device_count()",
        "tensor.is_cuda",
        "tensor.device.type != 'cuda'",
        "tensor.to('cuda')",
    ],
)
def test_the_rule_sees_each_way_to_name_cuda(line):
    assert any(map(names_cuda, ast.walk(ast.parse(line))))


def test_files_stay_under_600_lines_and_functions_under_100():
    functions = [
        (f"{name}:{node.lineno} {node.name}", (node.end_lineno or node.lineno) - node.lineno + 1)
        for name, source in FILES.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert [name for name, source in FILES.items() if source.count("\n") > 600] == []
    assert [name for name, lines in functions if lines > 100] == []


def test_no_two_classes_of_the_package_share_a_name():
    """A search for a class leads to one place."""
    places: dict[str, list[str]] = {}
    for file, source in FILES.items():
        if file.startswith("unirl/"):
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(file)
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_code_is_ascii():
    assert [name for name, source in FILES.items() if not source.isascii()] == []


def test_every_script_is_listed_for_those_who_change_the_code():
    listed = (ROOT / "AGENTS.md").read_text()
    scripts = [path.name for path in (ROOT / "scripts").iterdir() if path.suffix in (".py", ".sh")]
    assert "toy_cards.py" in scripts
    assert [name for name in scripts if f"{name}`" not in listed and f"{name} " not in listed] == []


def test_every_package_has_a_page():
    rooms = sorted(path.parent for path in (ROOT / "unirl").glob("*/__init__.py"))
    without = [str(room.relative_to(ROOT)) for room in rooms if not (room / "README.md").is_file()]
    assert not without, f"write the one-page README.md (the contract) of {without}"
