"""What every test relies on."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A job started in the background or under nohup inherits ignored signals and hands them on to the processes that tests
# start; those would then sit out the very signal they are tested with.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

# How long an example takes says nothing about the code where other test processes have the cores as well.
settings.register_profile("shared cores", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared cores")

MARK = "WATTGYM_TESTED_BY"
PATIENCE_S = 30.0


LONGEST_FIRST = (
    "test_flower_deployment.py",
    "test_readme.py",
    "test_knobs_live.py",
    "test_gap.py",
    "test_train_seeds_cli.py",
    "test_job.py",
    "test_faults.py",
    "test_deploy_cli.py",
    "test_train_cli.py",
    "test_ranks.py",
    "test_results_script.py",
    "test_engines.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first, then those with slow tests: no test process is left with a long one at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    rank = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: (rank.get(item.path.name, len(rank)), item.path not in slow))


def started_by_tests(mark: str) -> list[str]:
    """Processes that inherited a mark, wherever they are in the process tree, each with the test that started it."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = dict(v.split("=", 1) for v in (folder / "environ").read_text().split("\0") if "=" in v)
            command = (folder / "cmdline").read_text().replace("\0", " ")
        except (OSError, UnicodeDecodeError):
            continue
        # Python's own helper of shared memory ends with the process that it helps.
        if variables.get(MARK) == mark and "multiprocessing.resource_tracker" not in command:
            found.append(f"{variables.get('PYTEST_CURRENT_TEST')}: PID {folder.name}, {command}")
    return found


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    """The last test ends in an error if a process that any test started outlives them all."""
    mark = os.environ[MARK] = str(os.getpid())
    yield
    deadline_s = time.monotonic() + PATIENCE_S
    while (left := started_by_tests(mark)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert not left, left
