"""The README and the pages of docs/ against the repository: links, paths, commands, settings, and
the generated command reference."""

import dataclasses
import importlib
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from shardwise.cli import build_parser, check_words, parse
from shardwise.hardware import DEVICES
from shardwise.serve.api.metrics import Metrics
from shardwise.serve.engine_client import Stats
from shardwise.train.settings import Settings

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
MAX_COLUMNS = 120
SOURCE_PATH = re.compile(r"`([\w./*-]+\.(?:py|h|cpp|sh|svg|md))`")
TREE_PATH = re.compile(r"(?<![\w/.:-])((?:src|docs|bench|tests|csrc)/[\w./-]*\w)")
SETTING = re.compile(r"`(model|data|optimizer|run)\.([a-z_0-9]+)\b")
FILE_NAMES = {
    file.name
    for top in ("src", "csrc", "bench", "tests", "docs")
    for file in (ROOT / top).rglob("*")
} | {file.name for file in ROOT.iterdir()}
NAMES_OF_USERS = {"render.py"}

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def split_fences(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Return the prose of a page, and its fenced code blocks as (language, code)."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    prose = re.sub(r"^```\w*\n.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return prose, blocks


def slug(heading: str) -> str:
    """Return the anchor that GitHub gives to a heading."""
    text = re.sub(r"[`*]|\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


@pages
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    prose, _ = split_fences(page.read_text("utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), f"{page.name} links to {target}, which does not exist"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text("utf-8"), re.MULTILINE)
            assert anchor in map(slug, headings), f"{page.name} links to {target}: no such heading"


@pages
def test_every_path_of_the_repository_exists(page: Path) -> None:
    text = page.read_text("utf-8")
    roots = (ROOT, ROOT / "src" / "shardwise", page.parent)
    for path in SOURCE_PATH.findall(text):
        if path in NAMES_OF_USERS:
            continue
        found = any(any(root.glob(path)) for root in roots) if "/" in path else path in FILE_NAMES
        assert found, f"{page.name} names {path}, which does not exist"
    for path in TREE_PATH.findall(split_fences(text)[0]):
        assert (ROOT / path).exists(), f"{page.name} names {path}, which does not exist"


def command_lines(text: str) -> Iterator[str]:
    """Yield each `shardwise` command line in the code blocks of a page, fenced or indented, without
    prompt, comment and redirection."""
    prose, fences = split_fences(text)
    indented = "\n".join(line for line in prose.splitlines() if line.startswith("    "))
    for block in [indented, *(code for language, code in fences if language in ("", "bash"))]:
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            match = re.match(
                r"(?:\$ )?(?:[A-Z_]+=\S+ )*(?:shardwise|(?:srun |torchrun ).* -m shardwise) (.*)$",
                line.strip(),
            )
            if match:
                yield re.split(r"\s(?:[>|&]|2>)|;|\s#\s", match[1])[0].strip()


@pages
def test_every_command_of_a_code_block_parses(page: Path) -> None:
    if page.name == "commands.md":  # generated from the parsers; its usage lines have placeholders
        return
    for line in command_lines(page.read_text("utf-8")):
        words = shlex.split(line)
        if "--help" in words or "--version" in words:
            continue
        try:
            args = parse(words)
        except ValueError as error:
            raise AssertionError(f"{page.name}: shardwise {line}: {error}") from error
        assert args.command == words[0]


@pages
def test_every_command_and_flag_of_the_prose_exists(page: Path) -> None:
    parser = build_parser()
    prose, _ = split_fences(page.read_text("utf-8"))
    for line in re.findall(r"`shardwise ([^`\n]+)`", prose):
        words = line.replace("[", " ").replace("]", " ").split()
        is_group = words[0] in parser.subcommands and parser.subcommands[words[0]].subcommands
        if words[0].startswith("-") or words[0] == "COMMAND" or (is_group and len(words) == 1):
            continue
        check_words(parser, words, {})


def test_the_table_of_gpus_is_that_of_the_planner() -> None:
    text = (DOCS / "supported.md").read_text("utf-8")
    rows = [
        f"| `{name}` | {device.memory_bytes // 10**9} | {device.bf16_flops / 1e12:,.0f} "
        f"| {device.memory_bandwidth / 1e9:,.0f} |"
        for name, device in DEVICES.items()
    ]
    assert "\n".join(rows) in text


@pages
def test_every_import_of_a_python_block_works(page: Path) -> None:
    for language, block in split_fences(page.read_text("utf-8"))[1]:
        if language != "python":
            continue
        for module, names in re.findall(
            r"^from (shardwise[\w.]*) import (.+)$", block, re.MULTILINE
        ):
            for name in names.split(", "):
                assert hasattr(importlib.import_module(module), name), f"{module} has no {name}"


@pages
def test_every_setting_of_the_prose_exists(page: Path) -> None:
    sections = {
        section.name: {
            field.name for field in dataclasses.fields(getattr(Settings(), section.name))
        }
        for section in dataclasses.fields(Settings)
    }
    for section, key in SETTING.findall(page.read_text("utf-8")):
        if f"{section}.{key}" in ("run.toml", "data.json", "model.gguf"):
            continue
        assert key in sections[section], f"{page.name}: there is no setting {section}.{key}"


@pages
def test_prose_is_wrapped(page: Path) -> None:
    prose, _ = split_fences(page.read_text("utf-8"))
    for line in prose.splitlines():
        if not line.startswith(("|", "![", "<", "    ")) and "://" not in line:
            assert len(line) <= MAX_COLUMNS, f"{page.name}: {len(line)} columns: {line}"


def test_every_page_is_linked_from_the_index() -> None:
    index = DOCS / "README.md"
    targets = re.findall(r"\]\(([^)#\s]+)", index.read_text("utf-8"))
    linked = {(DOCS / target).resolve() for target in targets if "://" not in target}
    missing = [page for page in sorted(DOCS.rglob("*.md")) if page not in linked | {index}]
    assert not missing, f"docs/README.md does not link to {missing}"


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "generate_commands", DOCS / "generate_commands.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_command_reference_is_up_to_date() -> None:
    generator = load_generator()
    assert generator.PAGE.read_text("utf-8") == generator.render(), (
        "docs/commands.md is out of date; run `python docs/generate_commands.py`"
    )


def test_the_metrics_of_the_serving_page_are_those_of_the_server() -> None:
    metrics = Metrics()
    stats = Stats(*(0 for _ in dataclasses.fields(Stats)))
    exposed = metrics.text(stats).decode()
    kinds = dict(re.findall(r"^# TYPE (shardwise_\w+) (\w+)$", exposed, re.MULTILINE))
    real = {name for name in kinds if not name.endswith("_created")}
    page = (DOCS / "serving.md").read_text("utf-8")
    documented = set(re.findall(r"`(shardwise_\w+)`", page))
    assert documented == real, f"differ: {documented ^ real}"
