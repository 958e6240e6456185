"""What security.md promises of the source: no data becomes code; and the tests that it names exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cases import each

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "batchgen" / "docs"

UNPICKLERS = {"pickle", "_pickle", "cPickle", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle", "yaml", "imp"}
"""Modules that make objects, and so run code, of data."""
BUILT_IN = {"eval", "exec", "compile", "__import__"}
NEVER = {
    *("os.system", "os.popen", "tempfile.mktemp", "torch.hub.load", "marshal.load", "marshal.loads"),
    *("pandas.read_pickle", "pd.read_pickle", "numpy.fromfile", "importlib.reload"),
}
FLAGS = {"trust_remote_code": False, "allow_pickle": False, "shell": False, "weights_only": True}
"""Arguments that have one allowed value wherever they are given."""
REQUIRED = {
    "np.load": "allow_pickle",
    "torch.load": "weights_only",
    "from_pretrained": "trust_remote_code",
    "from_config": "trust_remote_code",
}
"""Calls that must give an argument, by the end of the function's name."""
ALLOWED = {
    # What the command names with --logit-processor; modules of the library next to that of one of its processors.
    "importlib.import_module": {"request/processors.py", "models/library/media_config.py"},
    "import_module": {"__init__.py", "text/grammar/worker.py", "text/chat/template_process.py"},  # constant names
    "runpy.run_path": {"bench/engines/peer_tools.py"},  # files of the package
    "runpy.run_module": set(),
    "ctypes.CDLL": {
        "kernels/cpu/library.py",
        "engine/memory/gc_control.py",
        "media/sounds.py",
    },  # compiled here; the process itself
    "torch.load": {"models/checkpoint/pickled_weights.py"},  # with --allow-pickle-weights, by the restricted reader
    "torch.ops.load_library": {"kernels/flash/library.py"},  # what the command names with --flash-library
    "subprocess.Popen": {
        *("kernels/cpu/build.py", "text/helper_process.py", "bench/process.py", "bench/jobs/commands.py")
    },
    "subprocess.run": {"bench/machine.py", "bench/process.py"},
    "Connection": {"text/helper_process.py"},  # pickles, between a run and its own helper
    "Pipe": {"job/scale/ray_workers.py"},  # between two threads of an actor
}
"""Calls that run code or programs: the files that may make them, below batchgen/, and why."""
PEERS = {"bench/engines/engine_openvino.py", "bench/engines/engine_transformers.py", "text/tokens/tokenizer.py"}
"""Files whose `from_pretrained` gives the argument otherwise, or loads in a process of a benchmark only."""


def faults(source: str, file: str) -> Iterator[str]:
    """What a module does that security.md excludes."""
    for node in ast.walk(ast.parse(source)):
        for module in _imported(node):
            if module.split(".")[0] in UNPICKLERS:
                yield f"imports {module}"
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            yield from (fault for key, value in pairs if key is not None for fault in _wrong_flag(_word(key), value))
        if isinstance(node, ast.Call):
            yield from _call_faults(node, file)


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


def _word(node: ast.AST) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def _wrong_flag(name: object, value: ast.expr) -> Iterator[str]:
    if isinstance(name, str) and name in FLAGS and _word(value) is not FLAGS[name]:
        yield f"gives {name}={ast.unparse(value)}"


def _call_faults(call: ast.Call, file: str) -> Iterator[str]:
    name = ast.unparse(call.func)
    if name in NEVER or (isinstance(call.func, ast.Name) and name in BUILT_IN):
        yield f"calls {name}"
    if file not in ALLOWED.get(name, {file}):
        yield f"calls {name}, which is not allowed here"
    for keyword in call.keywords:
        yield from _wrong_flag(keyword.arg, keyword.value)
    needed = next((flag for end, flag in REQUIRED.items() if name == end or name.endswith(f".{end}")), None)
    if needed is not None and needed not in {keyword.arg for keyword in call.keywords} and file not in PEERS:
        yield f"calls {name} without {needed}"


FILES = sorted((ROOT / "batchgen").rglob("*.py"))


def test_no_data_becomes_code() -> None:
    found = []
    for path in FILES:
        file = path.relative_to(ROOT / "batchgen").as_posix()
        found += [f"{file}: {fault}" for fault in faults(path.read_text(encoding="utf-8"), file)]
    assert not found


def test_each_allowed_place_is_used() -> None:
    for name, files in ALLOWED.items():
        for file in files:
            calls = ast.walk(ast.parse((ROOT / "batchgen" / file).read_text(encoding="utf-8")))
            names = {ast.unparse(node.func) for node in calls if isinstance(node, ast.Call)}
            assert name in names, f"{file} does not call {name}: take it off the list"


@each("line", [
        "import pickle", "from yaml import load", "import joblib.numpy_pickle", "eval(row)", "exec(row)",
        "torch.load(x)", "__import__(row)", "os.system(row)", "torch.load(x, weights_only=False)", "marshal.loads(x)",
        "np.load(x)",
        "np.load(x, allow_pickle=True)", "AutoConfig.from_pretrained(x)", "f(trust_remote_code=True)", "Pipe()",
        "f({'trust_remote_code': row})", "subprocess.run(x)", "g(shell=True)", "importlib.import_module(row)",
        "ctypes.CDLL(row)", "subprocess.Popen(x, shell=given)",
    ])  # fmt: skip
def test_the_rules_find_what_they_exclude(line: str) -> None:
    assert list(faults(line, "data/read/jsonl.py"))


def test_harmless_lines_pass() -> None:
    lines = "model.eval()\nre.compile(x)\nnp.load(x, allow_pickle=False)\njson.loads(x)\nf(trust_remote_code=False)"
    assert not list(faults(lines, "data/read/jsonl.py"))


@pytest.mark.parametrize("page", ["security.md", "reliability.md"])
def test_the_tests_that_a_page_names_exist(page: str) -> None:
    named = set(re.findall(r"`(tests/[\w/.]+)`", (DOCS / page).read_text(encoding="utf-8")))
    assert named
    assert not {name for name in named if not (ROOT / name).exists()}
