"""What the README shows of Python runs as it stands, and prints what it says."""

import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()


def test_python_without_torch_prints_what_the_comments_say() -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    told = re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE)
    assert told and len(told) == block.count("print(")
    program = f"{block}\nimport sys\nassert 'torch' not in sys.modules\n"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == told
