"""Every Python block of the README runs, in order, in one process as a reader would type them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"


def blocks():
    """The Python blocks, each with as many empty lines before it as make line numbers those of the README."""
    text = README.read_text() if README.exists() else ""
    for match in re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        line = text[: match.start(1)].count("\n") + 1
        yield line, match.group(1)


def test_python_blocks_run(tmp_path):
    found = list(blocks())
    assert found, "README.md has no Python block"
    lines: list[str] = []
    for line, code in found:
        lines += [""] * (line - 1 - len(lines)) + code.splitlines()
    script = tmp_path / "readme.py"
    script.write_text("\n".join(lines) + "\n")
    # the script lies elsewhere, so that what it defines is found as in any file of a user's
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-W", "error", str(script)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300, env=env)
    assert result.returncode == 0, f"README.md, lines as in the traceback:\n{result.stderr}"


@pytest.mark.parametrize("line, code", [pytest.param(n, c, id=f"line{n}") for n, c in blocks()])
def test_blocks_are_short(line, code):
    assert max(map(len, code.splitlines())) <= 100


def test_links_to_files():
    text = README.read_text() if README.exists() else ""
    for target in re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", text):
        assert (ROOT / target).exists(), f"README.md links to {target}, which is not there"
