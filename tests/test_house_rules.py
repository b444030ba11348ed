"""The design's rules on the source tree: imports point down, sizes, names, documents that tell the truth."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cute_fa
from cute_fa.core import env
from cute_fa.host import support

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = sorted((ROOT / "cute_fa").rglob("*.py"))
SOURCES = sorted([*PACKAGE, *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")])
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "third_party" / "README.md"]

# Rooms, bottom first. A room imports from lower levels and from itself, never from the other rooms of its own level.
LEVELS = (
    {"core"},
    {"reference", "tuning", "device"},
    {"kernels", "testing"},
    {"host"},
    {"ops"},
    {"api"},
    {"integrations", "examples", "cli"},
)
# cli shows what examples do; nothing else on a level imports its neighbour.
SIDEWAYS = {("cli", "examples")}
WITHOUT = {"core": {"torch", "cutlass"}, "tuning": {"torch", "cutlass"}, "kernels": {"torch"}, "device": {"torch"}}
BANNED_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def by_path(paths):
    return pytest.mark.parametrize("path", paths, ids=relative)


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), feature_version=(3, 10))


def imported_modules(module: ast.Module):
    """Every module a file imports, anywhere in it; `from cute_fa import x` counts as cute_fa.x."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            if node.module == "cute_fa":
                yield from (f"cute_fa.{alias.name}" for alias in node.names)
            else:
                yield node.module


def level_of(room: str) -> int:
    return next(level for level, rooms in enumerate(LEVELS) if room in rooms)


def room_of(path: Path) -> str:
    """The first folder below cute_fa, or the stem of a file that stands there itself."""
    return path.relative_to(ROOT / "cute_fa").with_suffix("").parts[0]


@by_path(PACKAGE)
def test_imports_point_down(path):
    room = room_of(path)
    if room in ("__init__", "__main__"):
        return
    for name in imported_modules(tree(path)):
        top, *rest = name.split(".")
        assert top not in WITHOUT.get(room, ()), f"{room} imports {name}"
        if top != "cute_fa" or not rest or rest[0] == "__version__":
            continue
        # `from cute_fa import flash_attn_func` imports the file that the name comes from.
        target = cute_fa.HOMES[rest[0]].split(".")[1] if rest[0] in cute_fa.HOMES else rest[0]
        if target != room and (room, target) not in SIDEWAYS:
            assert level_of(target) < level_of(room), f"{room} imports {name}"


@by_path(SOURCES)
def test_syntax_is_that_of_python_3_10(path):
    tree(path)


@by_path(SOURCES)
def test_sizes(path):
    assert len(path.read_text().splitlines()) <= 600, "a file has at most 600 lines"
    exempt = path == ROOT / "cute_fa" / "api.py" or room_of_or_none(path) == "ops"
    for node in ast.walk(tree(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno - node.lineno < 150, f"{node.name} has more than 150 lines"
            count = len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs)
            is_method = bool(node.args.args) and node.args.args[0].arg in ("self", "cls")
            assert exempt or count - is_method <= 10, f"{node.name} has more than 10 parameters"


def room_of_or_none(path: Path):
    return room_of(path) if (ROOT / "cute_fa") in path.parents else None


@by_path(PACKAGE)
def test_module_docstring_comes_first(path):
    assert ast.get_docstring(tree(path)), "a module begins with a docstring"


@by_path(SOURCES)
def test_asserts_have_messages(path):
    bare = [node.lineno for node in ast.walk(tree(path)) if isinstance(node, ast.Assert) and node.msg is None]
    assert not bare, f"asserts without a message in lines {bare}"


def test_no_room_without_a_name():
    for path in SOURCES:
        assert not BANNED_NAMES & set(path.relative_to(ROOT).with_suffix("").parts), relative(path)


def test_no_leftover_marks():
    mark = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    for path in SOURCES:
        if path != Path(__file__).resolve():
            assert not mark.search(path.read_text()), relative(path)


def test_tests_mirror_the_package():
    """tests/a/test_b.py tests cute_fa/a/b.py, or benchmarks/b.py; tests about the whole stand at the top."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        folder = path.relative_to(ROOT / "tests").parent
        subject = path.stem.removeprefix("test_")
        beside = ROOT / folder if folder.parts[:1] == ("benchmarks",) else ROOT / "cute_fa" / folder
        whole = {"test_house_rules", "test_contract", "test_import", "test_gpu_path", "test_training_path"}
        whole |= {"test_gradcheck", "test_main"}
        found = (beside / f"{subject}.py").exists() or (beside / subject).is_dir()
        assert found or path.stem in whole, f"{relative(path)} mirrors nothing"


def test_tracked_tree_is_small():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    sizes = [(ROOT / name).stat().st_size for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]
    assert sum(sizes) < 10 * 2**20, "tracked files stay below 10 MiB"


def test_readme_shows_the_support_table():
    assert support.markdown_table() in (ROOT / "README.md").read_text(), "copy support.markdown_table()"


def test_readme_lists_every_environment_variable():
    rows = [f"| `{v.name}` | `{v.default}` | {v.meaning} |" for v in env.VARIABLES]
    readme = (ROOT / "README.md").read_text()
    assert all(row in readme for row in rows), f"rows of the README: {rows}"
    read = re.compile(r"""(?:environ(?:\.get)?[\[(]|getenv\()["'](CUTE_FA_\w+)""")
    assert not [path for path in PACKAGE if read.search(path.read_text())], "read through core/env.py"


@by_path(DOCUMENTS)
def test_paths_in_documents_exist(path):
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    names = re.findall(r"`([\w./-]+\.(?:py|md|txt|csv|png|svg|toml)|[\w.-]+(?:/[\w.-]+)*/)`", text)
    names += re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    made_by_a_run = re.compile(r"^(runs/|\.venv/|log\.csv$|loss\.png$)")
    for name in names:
        places = (ROOT / name, path.parent / name, ROOT / "cute_fa" / name)
        assert made_by_a_run.match(name) or any(place.exists() for place in places), f"{name} does not exist"


def test_commands_in_documents_exist():
    """Every `cute-fa ...` in a document is a subcommand with these options."""
    text = "\n".join(path.read_text() for path in DOCUMENTS)
    lone_options, helps = set(re.findall(r"`(--[a-z-]+)(?: [\w./]+)?`", text)), ""
    commands = set(re.findall(r"(?:cute-fa|python3? -m cute_fa) ([a-z]+)((?: --[a-z-]+(?: [\w./]+)?)*)", text))
    assert {"train", "doctor", "gradcheck"} <= {command for command, _ in commands}, "commands are found"
    for command in sorted({command for command, _ in commands}):
        done = subprocess.run([sys.executable, "-m", "cute_fa", command, "--help"], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        helps += done.stdout
        for _, options in (pair for pair in commands if pair[0] == command):
            assert all(option in done.stdout for option in re.findall(r"--[a-z-]+", options)), f"{command}{options}"
    assert {"--text", "--attention"} <= lone_options, "options that stand alone are found"
    assert all(option in helps for option in lone_options), f"one of {lone_options} is no option of a subcommand"


def test_ci_runs_the_readme_test_command():
    readme, script = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    command = "python3 -m venv .venv && .venv/bin/pip install -c third_party/constraints.txt -e '.[dev]' && .venv/bin/"
    assert f"{command}pytest\n" in script and f"{command}pytest\n" in readme, "one command for tests"
    assert f"{command}cute-fa train\n" in readme, "one command for training"
