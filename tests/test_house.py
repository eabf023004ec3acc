"""The walls of the house: what may import what, and that the contracts which say so can fail."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import attrs
import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kvstate", "gpu_backend", "spec")
CONTRACTS = {
    contract["id"]: contract["name"]
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
}


def modules_after(statement: str) -> set[str]:
    """Names of the top-level modules that a fresh interpreter holds once it has run `statement`."""
    program = f"{statement}; import json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in json.loads(done.stdout)}


@pytest.mark.parametrize("statement", ["import kvstate", "import kvstate_spec", "import kvstate.testing.memory"])
def test_a_base_install_can_import(statement: str) -> None:
    extras = {"click", "greenlet", "hypothesis", "psutil", "rich", "torch"}
    assert not modules_after(statement) & extras


def core_files() -> list[Path]:
    """Every module of the core, from the day it is written."""
    files = sorted((ROOT / "kvstate").rglob("*.py"))
    return [path for path in files if path.relative_to(ROOT / "kvstate").parts[0] not in {"cli", "cli.py", "testing"}]


@pytest.mark.parametrize("path", core_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_core_imports_attrs_and_the_standard_library_only(path: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            imported.add((node.module or "").partition(".")[0])
    assert imported - sys.stdlib_module_names <= {"attr", "attrs", "kvstate"}


def lint_imports(checkout: Path) -> tuple[int, str]:
    """Exit code and output of import-linter over the packages in `checkout`."""
    program = "from importlinter.cli import lint_imports_command as main; main()"
    path = os.pathsep.join([str(checkout), str(checkout / "spec")])
    done = subprocess.run(
        [sys.executable, "-c", program, "--no-cache", "--no-logo"],
        cwd=checkout,
        # The columns keep a contract and its verdict on one line.
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def verdicts(output: str) -> dict[str, str]:
    """Contract id → KEPT or BROKEN, as printed."""
    found = {}
    for contract, name in CONTRACTS.items():
        match = re.search(rf"^{re.escape(name)} (KEPT|BROKEN)\b", output, re.MULTILINE)
        assert match, f"no verdict on {name!r} in:\n{output}"
        found[contract] = match.group(1)
    return found


def copy_of_the_packages(target: Path) -> Path:
    for package in PACKAGES:
        shutil.copytree(ROOT / package, target / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", target)
    return target


def test_the_contracts_are_kept() -> None:
    code, output = lint_imports(ROOT)
    assert (code, set(verdicts(output).values())) == (0, {"KEPT"}), output


@attrs.frozen
class Intruder:
    """A new module `module`, in file `path`, that imports what `contract` forbids."""

    contract: str
    module: str
    imports: tuple[str, ...]

    @property
    def path(self) -> str:
        file = self.module.replace(".", "/") + ".py"
        return f"spec/{file}" if self.module.startswith("kvstate_spec") else file

    @property
    def source(self) -> str:
        # A lazy import is an import.
        return "def lazily():\n" + "".join(f"    import {name}\n" for name in self.imports)


EXTRAS = ("click", "greenlet", "hypothesis", "psutil", "rich", "torch")
KIT_AND_COMMANDS = ("kvstate.testing", "kvstate.testing.memory", "kvstate.cli")
INTRUDERS = [
    Intruder("core-dependencies", "kvstate.intruder", (*EXTRAS, "gpu_backend", "kvstate_spec")),
    Intruder("core-dependencies", "kvstate.transitions.intruder", (*EXTRAS, "gpu_backend", "kvstate_spec")),
    Intruder("core-inside", "kvstate.intruder", KIT_AND_COMMANDS),
    Intruder("core-inside", "kvstate.transitions.intruder", KIT_AND_COMMANDS),
    Intruder("core-inside", "kvstate.testing.intruder", ("kvstate.cli",)),
    Intruder(
        "spec-independence",
        "kvstate_spec.intruder",
        (
            *EXTRAS,
            *KIT_AND_COMMANDS,
            "gpu_backend",
            "kvstate",
            "kvstate.manager",
            "kvstate.state",
            "kvstate.transitions",
        ),
    ),
    Intruder("spec-independence", "kvstate_spec.intruder", ("kvstate.transitions.offload",)),
    Intruder("backend-face", "gpu_backend.intruder", ("kvstate.state", "kvstate.transitions")),
    Intruder("backend-face", "gpu_backend.intruder", ("kvstate.transitions.offload",)),
    Intruder("no-torch", "kvstate.testing.intruder", ("gpu_backend", "torch")),
    Intruder("no-torch", "kvstate.cli", ("gpu_backend", "torch")),
]


@pytest.mark.parametrize("intruder", INTRUDERS, ids=lambda intruder: f"{intruder.contract}-{intruder.module}")
def test_a_contract_fails_when_a_module_breaks_it(intruder: Intruder, tmp_path: Path) -> None:
    checkout = copy_of_the_packages(tmp_path)
    package = checkout / intruder.path.removesuffix(".py") / "__init__.py"
    with open(package if package.exists() else checkout / intruder.path, "a", encoding="utf-8") as file:
        file.write("\n\n" + intruder.source)

    code, output = lint_imports(checkout)

    assert code != 0
    assert verdicts(output) == {name: "BROKEN" if name == intruder.contract else "KEPT" for name in CONTRACTS}, output
    for imported in intruder.imports:
        assert f"{intruder.module} -> {imported} " in output


def test_every_contract_is_broken_by_some_intruder() -> None:
    assert {intruder.contract for intruder in INTRUDERS} == set(CONTRACTS)


def test_the_example_of_the_readme_runs_as_it_stands() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^<!-- example -->\n```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1
    assert "PLACEHOLDER" not in blocks[0]
    done = subprocess.run([sys.executable, "-c", blocks[0]], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
