"""A quarter minute of the campaign: whatever is wrong with what fp8q reads, it ends with a line and leaves nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).with_name("campaign.py")
#: Cases that are run however slow the machine is, two of them in real processes; the quarter is for 100.
LEAST = 40


@pytest.mark.slow
def test_nothing_that_is_wrong_with_a_file_an_option_or_the_moment_makes_it_stumble(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    cases = ("--minutes", "0.25", "--cases", "100", "--least", str(LEAST), "--real-every", "20")
    command = [sys.executable, str(CAMPAIGN), *cases, "--kills", "6", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert out.exists(), done.stderr
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["found"] == []
    assert found["killed"] == []
    kills = [found[name] for name in ("kills", "kills_streamed", "kills_of_conversions")]
    assert (kills, done.returncode) == ([6, 2, 2], 0)
    assert LEAST <= found["cases"] <= 100
    assert found["real_processes"] == found["cases"] // 20
