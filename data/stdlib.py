"""The built-in corpus: the Python standard library's own modules, real text on every machine that runs this."""

import sys
import sysconfig
from pathlib import Path

EXCLUDED = {"test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo"}


def module_files() -> list[Path]:
    """Modules that are not UTF-8 are left out (CPython 3.11 to 3.13 have none besides tests)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    for name in sorted(sys.stdlib_module_names - EXCLUDED):
        files += [root / f"{name}.py"] if (root / f"{name}.py").is_file() else []
        files += sorted((root / name).rglob("*.py"))
    files = [path for path in files if not EXCLUDED & set(path.relative_to(root).parts) and is_utf8(path)]
    if len(files) < 100:
        raise ValueError(f"{root} holds only {len(files)} modules of the standard library: set data.path to a text")
    return files


def is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode()
    except UnicodeDecodeError:
        return False
    return True
