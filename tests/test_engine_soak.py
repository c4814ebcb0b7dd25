"""Half an hour's worth of load on the radix engine, in a process that does nothing else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_half_an_hour_of_random_load_leaks_no_block_and_no_byte() -> None:
    script = Path(__file__).with_name("engine_soak.py")
    environment = os.environ | {"PYTHONPATH": str(script.parents[1])}
    output = subprocess.check_output([sys.executable, script, "1800"], env=environment, text=True)
    found = json.loads(output)
    assert sum(found["ended"].values()) == 1800 * 20
    assert found["ended"].keys() == {"CANCELLED", "LENGTH", "STOP"}
    assert found["evicted"] > 100_000
    assert not any(found["left"].values()), found
    assert found["largest"] < 1.03 * found["warm"], found
