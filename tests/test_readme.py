"""What README says is run: every Python block, and the commands it shares with CI."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_every_python_block_runs(number: int, tmp_path: Path) -> None:
    block = BLOCKS[number]
    script = tmp_path / f"test_block_{number}.py"
    script.write_text(block)
    is_test = "async def test_" in block
    command = ["-m", "pytest", "-q", "-o", "trio_mode=true"] if is_test else ["-W", "error"]

    done = subprocess.run(
        [sys.executable, *command, script.name],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr


def test_the_blocks_are_found() -> None:
    assert len(BLOCKS) == 4


def test_ci_runs_the_test_command() -> None:
    commands = re.findall(r"```sh\n(.*?)\n```", README, flags=re.DOTALL)

    assert (
        next(command for command in commands if "pytest" in command)
        in (ROOT / ".ci" / "run").read_text()
    )
