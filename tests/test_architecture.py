"""The rules of the house as tests: layers, cycles, torch-free imports, sizes, names, language."""

import ast
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src/shardwise"

CORE = {
    "block", "chunks", "config", "environment", "hardware", "kv_pages", "layout", "params",
    "precision", "setting", "shards", "suggest", "writing",
}  # fmt: skip
MODEL_SIDE = {"core", "quant", "kernels", "model", "formats"}
LAYERS: dict[str, set[str]] = {
    "core": set(),
    "quant": {"core"},
    "kernels": {"core", "quant"},
    "model": {"core", "quant", "kernels"},
    "formats": {"core", "quant", "kernels", "model"},
    "quantize": MODEL_SIDE,
    "parallel": MODEL_SIDE,
    "plan": {"core", "quant", "formats", "parallel"},
    "train": {*MODEL_SIDE, "parallel", "plan"},
    "serve": {*MODEL_SIDE, "quantize", "parallel", "plan"},
    "measure": {*MODEL_SIDE, "quantize", "parallel", "plan", "train", "serve"},
    "commands": {*MODEL_SIDE, "quantize", "parallel", "plan", "train", "serve", "measure"},
    "cli": {"core", "commands"},
}
"""The packages that each package may import, beside itself."""

WITHOUT_TORCH = (
    *(f"shardwise.{name}" for name in sorted(CORE)),
    "shardwise.cli",
    "shardwise.plan",
    "shardwise.formats.catalogue",
    "shardwise.parallel.pipeline.actions",
    "shardwise.parallel.pipeline.schedules",
    "shardwise.parallel.pipeline.table",
    "shardwise.parallel.pipeline.validate",
    "shardwise.serve.engine.scheduler",
    "shardwise.serve.engine.pages",
    "shardwise.serve.api.server",
)

MAX_FILES_OF_A_FOLDER = 16
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 10
TRITON = "a Triton kernel: each pointer and stride is a parameter"
LONG_FILES: dict[str, str] = {
    "shardwise.layout": "one value: its parts, its problems, its short form",
    "shardwise.parallel.fsdp": "one store and its executor, which share PyTorch's hooks",
    "shardwise.kernels.triton.attention": TRITON,
    "shardwise.kernels.triton.linear": TRITON,
}
LONG_FUNCTIONS: dict[str, str] = {
    "shardwise.commands.plan.add_plan": "one flag after another",
    "shardwise.kernels.triton.attention.attend_kernel": TRITON,
    "shardwise.kernels.triton.attention.launch_tiles": "passes each of them",
    "shardwise.kernels.triton.linear.product_kernel": TRITON,
    "shardwise.kernels.triton.pointwise.rope_and_write_kv_kernel": TRITON,
    "shardwise.parallel.apply.apply": "the order of sharding, in one place, with its docstring",
    "shardwise.plan.planner.plan": "the public entry: half of it is its docstring",
}
MANY_PARAMETERS: dict[str, str] = {
    "shardwise.kernels.triton.attention.attend_kernel": TRITON,
    "shardwise.kernels.triton.attention.merge_blocks_kernel": TRITON,
    "shardwise.kernels.triton.linear.product_kernel": TRITON,
    "shardwise.kernels.triton.linear.look_up_kernel": TRITON,
    "shardwise.kernels.triton.pointwise.rope_and_write_kv_kernel": TRITON,
    "shardwise.parallel.zero.__init__": "the store: its units, dtypes and the options of a run",
    "shardwise.plan.planner.plan": "the public entry: one parameter for each flag of the command",
}
"""Exceptions to the sizes, each with its reason."""

SAME_FILE_NAMES: dict[str, str] = {
    "attention": "the reference, and Triton's",
    "batch": "a micro-batch of the model, and a step's tables in Triton",
    "convert": "the command, and what it does",
    "data": "the command, data parallel, and training data",
    "metrics": "of the server, and of training",
    "parity": "the command, and what it does",
    "sampling": "the reference, and the native one",
    "serving": "kernels of serving: the reference, and native ones",
    "settings": "of the server, and of training",
    "terminal": "of commands, and of pictures of schedules",
    "training": "kernels of training: the reference, and native ones",
    "validate": "of pipeline tables, and of training runs",
}
SAME_NAMES: dict[str, str] = {
    "Batch": "of a training step, and of a step of the engine",
    "Metrics": "of training, and of the server",
    "gated": "the reference, and Triton's",
    "main": "the command line, and the processes of the engine and of chat templates",
    "rms_norm": "the reference, and Triton's",
}
"""File names, and names of functions and classes, that are one idea in several places."""

NO_SUBJECT = re.compile(
    r"^(Of|By|From|To|In|On|With|For|At|As|Whether|What|Which|Who|How|Where|When|Why)\b"
)
NOT_OUR_WORDS = {
    r"in any company": "batch-invariant",
    r"\btold\b": "reported, logged, returned",
    r"\bturned by\b": "rotated",
    r"made again": "recomputed",
    r"made plain|plain numbers": "dequantized, unquantized",
    r"\bgiven up\b": "freed, consumed",
    r"who asks|may ask": "client, request",
    r"\bthat there (is|are)\b": "available, existing",
    r"is no way to": "unknown, unsupported",
    r"half a character": "partial UTF-8 sequence",
}


def module_name(path: Path) -> str:
    parts = ("shardwise", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


@cache
def sources() -> Mapping[str, Path]:
    """The files of the package, by module."""
    return {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(sources()[module].read_text(encoding="utf-8"))


def layer(module: str) -> str:
    part = module.split(".")[1] if "." in module else "cli"
    return "core" if part in CORE else "cli" if part == "__main__" else part


def imported(module: str) -> Iterator[str]:
    """Yield everything that a module imports, inside functions and TYPE_CHECKING too."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{module}: relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in sources() else node.module


@cache
def graph() -> Mapping[str, frozenset[str]]:
    """The modules of the package that each module imports."""
    return {name: frozenset(imported(name)) & (sources().keys() - {name}) for name in sources()}


def closure(module: str) -> set[str]:
    found: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += graph()[name]
    return found


# -- structure


def test_packages_import_only_the_layers_below_them() -> None:
    wrong = [
        f"{module} imports {other}"
        for module, others in graph().items()
        for other in sorted(others)
        if layer(module) != layer(other)
        and module != "shardwise"  # which offers LLM and SamplingParams by name
        and layer(other) not in LAYERS[layer(module)]
    ]
    assert not wrong, "\n".join(wrong)


def test_there_are_no_import_cycles() -> None:
    """Imports inside functions and under TYPE_CHECKING count."""
    cycles = {
        frozenset(other for other in closure(name) if name in closure(other)) for name in graph()
    }
    assert not [sorted(cycle) for cycle in cycles if len(cycle) > 1]


def test_the_model_imports_neither_the_choice_of_kernels_nor_an_implementation() -> None:
    reached = closure("shardwise.model.transformer")
    kernels = {name for name in reached if name.startswith("shardwise.kernels.")}
    assert not [name for name in kernels if re.search(r"registry|reference|native|triton", name)], (
        kernels
    )
    assert len(reached) <= 12


def test_training_reaches_no_code_of_serving() -> None:
    reached = closure("shardwise.train.rank")
    assert not [name for name in reached if re.match(r"shardwise\.(serve|commands|quantize)", name)]
    assert not [name for name in reached if re.search(r"kernels\..*(paged|serving|triton)", name)]


def test_the_training_loop_imports_types_and_not_their_assembly() -> None:
    """It runs a `Program` of any layout; `train/rank.py` builds one."""
    reached = closure("shardwise.train.loop")
    assert not [name for name in reached if re.search(r"apply|fsdp|registry|native", name)]
    assert len(reached) <= 50


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_core_types_planner_and_server_import_no_torch(module: str) -> None:
    code = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_modules_that_ranks_are_forked_with_start_neither_threads_nor_cuda() -> None:
    modules = "shardwise.train.rank, shardwise.serve.engine.worker, shardwise.measure.parity"
    code = (
        f"import {modules}, os, sys, torch; "
        "sys.exit(torch.cuda.is_initialized() or len(os.listdir('/proc/self/task')) > 1)"
    )
    alone = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # NumPy's threads survive a fork
    assert subprocess.run([sys.executable, "-c", code], timeout=60, env=alone).returncode == 0


def test_the_program_that_renders_chat_templates_imports_nothing_of_the_package() -> None:
    assert not graph()["shardwise.formats.tokenizers.chat_template"]


def test_only_parallel_calls_torch_distributed() -> None:
    wrong = [
        module
        for module in sources()
        if layer(module) != "parallel"
        and any(name.startswith("torch.distributed") for name in imported(module))
    ]
    assert not wrong


def test_one_file_reads_the_environment() -> None:
    wrong = [
        module
        for module, path in sources().items()
        if module != "shardwise.environment"
        and re.search(r"\bos\.(environ|getenv)|from os import .*environ", path.read_text())
    ]
    assert not wrong


# -- sizes and names


def test_no_folder_holds_too_many_files() -> None:
    folders: dict[Path, int] = defaultdict(int)
    for path in sources().values():
        folders[path.parent] += path.name != "__init__.py"
    assert not {
        str(folder.relative_to(PACKAGE)): count
        for folder, count in folders.items()
        if count > MAX_FILES_OF_A_FOLDER
    }


def test_a_file_name_stands_for_one_idea() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for module in sources():
        if sources()[module].name != "__init__.py":
            homes[module.split(".")[-1]].append(module)
    twice = {stem for stem, modules in homes.items() if len(modules) > 1}
    assert twice == SAME_FILE_NAMES.keys(), {stem: homes[stem] for stem in twice}


def test_a_name_is_defined_in_one_file() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for module in sources():
        for node in tree(module).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                homes[node.name].append(module)
    twice = {name for name, modules in homes.items() if len(modules) > 1}
    assert twice == SAME_NAMES.keys(), {
        name: homes[name] for name in sorted(twice ^ SAME_NAMES.keys())
    }


def test_one_function_writes_json() -> None:
    """`json.dumps` writes NaN, which is not JSON; chat templates have transformers' own."""
    tokenizers = "shardwise.formats.tokenizers"
    templates = {f"{tokenizers}.chat_template", f"{tokenizers}.template_process"}
    allowed = {"shardwise.writing.json_text", *templates}
    writers = {
        module
        for module in sources()
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("json.dumps", "json.dump")
    }
    assert writers == allowed


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for module in sources():
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{module}.{node.name}", node


def test_files_and_functions_are_short() -> None:
    long_files = {
        module: lines
        for module, path in sources().items()
        if (lines := len(path.read_text().splitlines())) > MAX_FILE_LINES
    }
    long_functions = {
        name: lines
        for name, node in functions()
        if node.end_lineno and (lines := node.end_lineno - node.lineno + 1) > MAX_FUNCTION_LINES
    }
    many_parameters = {
        name: count
        for name, node in functions()
        if (count := len(node.args.args + node.args.kwonlyargs)) > MAX_PARAMETERS
    }
    assert long_files.keys() == LONG_FILES.keys(), long_files
    assert long_functions.keys() == LONG_FUNCTIONS.keys(), long_functions
    assert many_parameters.keys() == MANY_PARAMETERS.keys(), many_parameters


# -- language


def test_docstrings_begin_with_a_clause() -> None:
    wrong = []
    for module in sources():
        for node in ast.walk(tree(module)):
            if isinstance(
                node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            ) and NO_SUBJECT.match(text := ast.get_docstring(node) or ""):
                wrong.append(f"{module}: {text.splitlines()[0]}")
    assert not wrong, "\n".join(wrong)


def texts() -> Iterator[tuple[str, str]]:
    """Yield (path, text) of everything that people read."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    sources_of_kernels = sorted((ROOT / "csrc").glob("*"))
    for path in (*sources().values(), *pages, *sources_of_kernels):
        yield os.path.relpath(path, ROOT), path.read_text(encoding="utf-8")


@pytest.mark.parametrize("pattern", NOT_OUR_WORDS)
def test_the_words_are_those_of_the_glossary(pattern: str) -> None:
    """docs/glossary.md has the term for each."""
    found = [
        f"{path}:{number}: {line.strip()}"
        for path, text in texts()
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert not found, f"write {NOT_OUR_WORDS[pattern]}:\n" + "\n".join(found)


def test_every_term_of_the_glossary_is_defined_once() -> None:
    text = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE)
    terms = [term for term, _ in rows if term != "term" and not term.startswith("---")]
    assert len(terms) == len(set(terms)) >= 60
