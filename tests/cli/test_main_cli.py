import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from wattgym.cli import main

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "pandas", "matplotlib", "numpy", "scipy", "stable_baselines3", "gymnasium", "pyarrow", "pynvml")
COMMANDS = ("train", "evaluate", "tune-baselines", "score", "traces", "hw")


def run(*arguments):
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    return caught.value.code or 0


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["evaluate", "--help"], ["traces", "--help"]])
def test_help_loads_nothing_heavy(arguments):
    script = (
        "import sys\nfrom wattgym.cli import main\ntry:\n    main(sys.argv[1:])\nexcept SystemExit as end:\n"
        f"    print('LOADED', [name for name in {HEAVY} if name in sys.modules], end.code)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED [] 0"


def test_importing_the_package_loads_nothing_heavy():
    # Gymnasium, where environments are registered, brings NumPy.
    script = f"import sys, wattgym; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert set(ast.literal_eval(done.stdout)) <= {"gymnasium", "numpy"}


def test_module_and_console_script_are_the_same_command():
    module = subprocess.run([sys.executable, "-m", "wattgym", "--help"], capture_output=True, text=True, check=True)
    assert all(command in module.stdout for command in COMMANDS)
    entry = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["wattgym"]
    assert entry == "wattgym.cli:main"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command, capsys):
    assert run(command, "--help") == 0
    assert "Usage" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["no-such-command"], ["train", "--no-such-option"], ["score", "1", "2"]])
def test_usage_errors_are_exit_code_2_without_traceback(arguments, capsys):
    assert run(*arguments) == 2
    err = capsys.readouterr().err
    assert err
    assert "Traceback" not in err


def test_without_arguments_the_help_is_shown(capsys):
    run()
    assert "Usage" in "".join(capsys.readouterr())
