"""Imports flow one way, and nothing heavy is imported before it is needed."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "model": set(),
    "data": set(),
    "weights": {"model", "data"},
    "training": {"model", "data", "weights"},
    "configs": {"model", "data", "training"},
    "sampling": {"model", "data"},
    "sample.py": {"model", "data", "weights", "sampling", "training"},
    "train.py": {"model", "data", "weights", "sampling", "training", "configs"},
}
OURS = {name.removesuffix(".py") for name in MAY_IMPORT} | {"benchmarks", "tests"}
FORBIDDEN = {"utils", "common", "helpers", "misc"}


def files(name: str) -> list[Path]:
    return [ROOT / name] if name.endswith(".py") else sorted((ROOT / name).rglob("*.py"))


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add((node.module or "").split(".")[0])
    return found


@pytest.mark.parametrize("name", MAY_IMPORT)
def test_imports_flow_one_way(name):
    for path in files(name):
        strangers = (imported(path) & OURS) - MAY_IMPORT[name] - {name}
        assert not strangers, f"{path.relative_to(ROOT)} imports {strangers}"


def test_sampling_imports_no_optimizer():
    tree = ast.walk(ast.parse((ROOT / "sample.py").read_text()))
    modules = {node.module for node in tree if isinstance(node, ast.ImportFrom)}
    assert {module for module in modules if module.startswith("training")} <= {"training.device"}


def test_no_module_is_named_after_nothing():
    assert not [path for name in MAY_IMPORT for path in files(name) if path.stem in FORBIDDEN]


def test_hydra_is_known_to_configs_and_train_only_and_wandb_to_reporting():
    for name in MAY_IMPORT:
        for path in files(name):
            if path.parent.name != "configs" and path.name != "train.py":
                assert not imported(path) & {"hydra", "omegaconf"}, path
            if path.name != "reporting.py":
                assert "wandb" not in imported(path), path


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*{{name.split('.')[0] for name in sys.modules}})"
    return set(subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split())


def test_training_and_sampling_start_without_the_heavy_libraries():
    heavy = {"datasets", "pandas", "pyarrow", "wandb", "matplotlib", "transformers", "tokenizers", "rustbpe"}
    assert not loaded_by("import train") & heavy
    assert not loaded_by("import sample") & (heavy | {"torch", "numpy", "tiktoken"})
