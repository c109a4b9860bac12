"""The house style, enforced: lengths, the arrows between the rooms, explained suppressions."""

import ast
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_COLUMNS = 120

# The rooms of blockstore, low to high. A module imports only from its own level and lower ones.
LEVELS = [
    ["libc", "errors", "failures"],
    ["pending", "spill"],
    ["fs", "digest", "wyhash", "jsontext"],
    ["memory", "versions", "locks", "workers", "index_rows", "wyhash_many", "stamp", "probe", "transaction", "mapping"],
    ["records", "rules", "parse", "header", "identity", "environment"],
    ["cut", "blocks", "buffers", "prefixes", "leases", "placing", "meta", "header_files", "safetensors"],
    ["limits", "quotas", "history", "restoring", "walk"],
    ["ledger", "packing"],
    ["index", "layout", "monolith"],
    ["rooms"],
    ["entries", "sources", "listing", "findings", "pointers"],
    ["rows_files", "mlx_lm_caches"],
    ["full_mark", "space"],
    ["collect", "rebuild", "check", "report"],
    ["admission"],
    ["preparing", "saving", "loading"],
    ["files"],
    ["moving"],
    ["opening"],
    ["store"],
    ["agreement", "extracted", "prompt_cache_files"],
    ["write_behind", "checkpoints"],
    ["prompt_cache", "resume"],
    ["cli_text", "cli_exit", "cli_ids", "cli_run", "cli_views", "cli_app"],
    ["cli_prompt"],
    ["cli_move", "cli_limits"],
    ["serve_metrics", "serve_signals"],
    ["serve_http"],
    ["serve"],
    ["cli_serve"],
    ["demo", "cli"],
    ["__init__", "__main__"],
]
# These handle arrays. No other room imports mlx, nor more of kvcodecs than what describes a cache.
WITH_ARRAYS = {
    "buffers",
    "placing",
    "packing",
    "restoring",
    "monolith",
    "rows_files",
    "sources",
    "preparing",
    "saving",
    "loading",
}
WITH_ARRAYS |= {"files", "moving", "demo", "mlx_lm_caches", "prompt_cache_files", "extracted"}
WITH_ARRAYS |= {"write_behind", "prompt_cache", "checkpoints", "resume", "serve_http", "serve"}
# These may import mlx inside a function, so that a command that needs no array starts without it.
LAZY = {"store", "cli", "cli_move", "cli_serve", "__init__", "__main__"}
WITHOUT_ARRAYS = {name for names in LEVELS for name in names} - WITH_ARRAYS - LAZY
DESCRIPTIONS = {"kvcodecs.entry", "kvcodecs.geometry"}


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


SOURCES = python_files("blockstore", "codecs", "tools")
EVERYTHING = [*SOURCES, *python_files("tests")]
ROOMS = python_files("blockstore")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def room_of(path: Path) -> str:
    """The module of blockstore that a file is, or the sub-package that it is in."""
    return path.relative_to(ROOT / "blockstore").with_suffix("").parts[0]


def each(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=name_of)


# ---- lengths


@each(SOURCES)
def test_files_and_functions_are_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_FILE_LINES
    functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    lengths = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in functions}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FUNCTION_LINES} == {}


@each(EVERYTHING)
def test_lines_are_short(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [number for number, line in enumerate(lines, 1) if len(line) > MAX_COLUMNS] == []


# ---- arrows


def imports(path: Path, *, module_level: bool = False) -> set[str]:
    """The dotted names that a file of blockstore or kvcodecs imports; imports for type checkers are left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = ["blockstore"] if path in ROOMS else ["kvcodecs"]
    return {name for node in run_nodes(tree, module_level) for name in imported(node, package)}


def run_nodes(node: ast.AST, module_level: bool) -> Iterator[ast.AST]:
    """The nodes below that run: at some time, or already when the module is imported."""
    for child in ast.iter_child_nodes(node):
        for_checkers = isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")
        later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        if not for_checkers and not (module_level and later):
            yield child
            yield from run_nodes(child, module_level)


def imported(node: ast.AST, package: list[str]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    prefix = ".".join([*package, node.module or ""] if node.level else [node.module or ""]).strip(".")
    # `from . import fs` names a module, `from .fs import FileSystem` something in one.
    return [f"{prefix}.{alias.name}" for alias in node.names] if prefix in ("blockstore", "kvcodecs") else [prefix]


def of(names: set[str], *packages: str) -> set[str]:
    return {name for name in names if name.split(".")[0] in packages}


@each(ROOMS)
def test_every_room_has_a_level_and_imports_none_above_it(path: Path) -> None:
    level = {name: number for number, names in enumerate(LEVELS) for name in names}
    room = room_of(path)
    assert room in level, f"{name_of(path)}: give it a level in LEVELS"
    for name in of(imports(path), "blockstore"):
        target = f"{name}.".split(".")[1]
        target = target if target in level else "__init__"
        assert level[target] <= level[room], f"{name_of(path)} imports {name}, which is above it"


@each([path for path in ROOMS if room_of(path) in WITHOUT_ARRAYS])
def test_the_lower_rooms_know_no_arrays(path: Path) -> None:
    found = imports(path)
    assert of(found, "mlx", "mlx_lm") == set()
    assert of(found, "kvcodecs") - DESCRIPTIONS == set()


@each([path for path in ROOMS if room_of(path) in LAZY])
def test_the_rooms_that_start_without_arrays_import_none_at_module_level(path: Path) -> None:
    found = imports(path, module_level=True)
    assert of(found, "mlx", "mlx_lm", *(["numpy"] if room_of(path) == "cli" else [])) == set()
    assert of(found, "kvcodecs") - DESCRIPTIONS == set()


def test_importing_the_command_and_the_lower_rooms_loads_no_mlx() -> None:
    rooms = sorted({room_of(path) for path in ROOMS} & (WITHOUT_ARRAYS | {"cli", "store"}))
    lines = [f"import blockstore.{room}" for room in rooms]
    lines += ["import sys", "print(sorted({name.split('.')[0] for name in sys.modules} & {'mlx', 'mlx_lm'}))"]
    paths = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'codecs')!r}]"
    command = [sys.executable, "-c", "\n".join([paths, *lines])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


@each(python_files("codecs"))
def test_kvcodecs_imports_nothing_of_blockstore(path: Path) -> None:
    assert of(imports(path), "blockstore") == set()


# ---- words

DIRECTIVE = re.compile(r"#\s*(type:\s*ignore|pyright:\s*ignore|noqa|pragma:)")
# The rule by name, then some words.
RULES = (
    r"type: ignore\[[\w, -]+\]",
    r"pyright: ignore\[\w+\]",
    r"noqa: [A-Z]+\d+(?:, ?[A-Z]+\d+)*",
    "pragma: no cover",
)
REASON = re.compile(rf"# ?(?:{'|'.join(RULES)})[^\w]+\w+ \w+")
# Split so that this file does not hold what it looks for.
UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX)\b")
FORBIDDEN = re.compile(r"\bpickle\b|\bglobals\(\)\[[^\]]*\](?!\s*=[^=])")  # setting a name is fine
MACHINE_PATH = re.compile(r"(?<![\w.~])/(?:home|Users|root|work|opt|private)/")


def comments(path: Path) -> Iterator[tokenize.TokenInfo]:
    with tokenize.open(path) as file:
        yield from (token for token in tokenize.generate_tokens(file.readline) if token.type == tokenize.COMMENT)


@each(EVERYTHING)
def test_every_suppression_names_its_rule_and_its_reason(path: Path) -> None:
    found = [token for token in comments(path) if DIRECTIVE.search(token.string)]
    assert [(token.start[0], token.string) for token in found if not REASON.search(token.string)] == []


@pytest.mark.parametrize("rule", ["type: ignore[misc]", "noqa: B008", "noqa: E501, B008", "pragma: no cover"])
def test_a_rule_needs_words_behind_it(rule: str) -> None:
    assert DIRECTIVE.search(f"# {rule}")
    assert REASON.search(f"# {rule}  # lmdb has no stubs")
    assert not REASON.search(f"# {rule}")


@each(EVERYTHING)
def test_nothing_is_left_unfinished_and_nothing_names_this_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert UNFINISHED.findall(text) == []
    assert MACHINE_PATH.findall(text) == []


@each(SOURCES)
def test_no_pickle_and_no_class_by_name(path: Path) -> None:
    assert FORBIDDEN.findall(path.read_text(encoding="utf-8")) == []


@each([path for path in SOURCES if not path.stem.startswith("_") or path.stem == "__init__"])
def test_every_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def test_the_documents_name_no_machine() -> None:
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "blockstore").glob("*.md")]
    documents += [ROOT / "Makefile", ROOT / "pyproject.toml"]
    assert {name_of(path) for path in documents if MACHINE_PATH.search(path.read_text(encoding="utf-8"))} == set()
