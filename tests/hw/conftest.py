"""An NVML stand-in: a C library with simulated GPUs that processes share, built once per test session."""

import ctypes
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("nvml_standin.c")


def build_standin(folder: Path, *flags: str, name: str = "libnvidia-ml.so.1") -> Path:
    """Compiles the stand-in to `folder`; by its SONAME the dynamic loader takes it for NVML."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: the NVML stand-in cannot be built")
    library = folder / name
    command = [compiler, "-Wall", "-Wextra", "-Werror", "-O2", "-shared", "-fPIC", *flags]
    command += [f"-Wl,-soname,{name}", "-o", str(library), str(SOURCE), "-lm", "-lpthread"]
    subprocess.run(command, check=True)
    return library


@dataclass
class StandIn:
    """One machine of simulated GPUs: a state file, and hooks to steer it from outside NVML.

    Attributes:
        library: The shared object; its folder goes into LD_LIBRARY_PATH of processes that shall see the GPUs.
        state: State file of this machine.
        gpus: Comma-separated boards: P100, V100, A100, A40, H100, H200.
    """

    library: Path
    state: Path
    gpus: str
    hooks: ctypes.CDLL

    def env(self, **more: str) -> dict[str, str]:
        """Environment of a process that finds these GPUs with the unmodified binding."""
        own = {"LD_LIBRARY_PATH": str(self.library.parent), "NVML_STANDIN_STATE": str(self.state)}
        return {**os.environ, **own, "NVML_STANDIN_GPUS": self.gpus, **more}

    def run(self, code: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Runs Python code in a process that sees these GPUs."""
        command = [sys.executable, "-W", "error", "-c", code, *args]
        return subprocess.run(command, env=self.env(**env), capture_output=True, text=True, timeout=60)

    def set(self, index: int, key: str, value: float = 1) -> None:
        """Sets a value of a GPU; keys are in `nvml_standin.c` (also `permitted` and `driver_reload`)."""
        if self.hooks.standin_set(index, key.encode(), ctypes.c_double(value)):
            raise KeyError(key)

    def get(self, index: int, key: str) -> float:
        """Reads a value of a GPU, true values included; NaN for an unknown key."""
        return self.hooks.standin_get(index, key.encode())

    def advance(self, seconds: float) -> None:
        """Moves virtual time on."""
        self.hooks.standin_advance(ctypes.c_double(seconds))

    @staticmethod
    def uuid(index: int) -> str:
        return f"GPU-{0xFA4E0000 + index:08x}-0000-4000-8000-{index:012x}"


@pytest.fixture(scope="session")
def standin_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_standin(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="session")
def standin_hooks(standin_library: Path, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    # A copy without NVML's SONAME, so that this process does not find "NVML" from now on.
    library = build_standin(tmp_path_factory.mktemp("hooks"), name="standin_hooks.so")
    hooks = ctypes.CDLL(str(library))
    hooks.standin_get.restype = ctypes.c_double
    hooks.standin_sizeof.restype = ctypes.c_size_t
    return hooks


@pytest.fixture
def make_standin(standin_library: Path, standin_hooks: ctypes.CDLL, tmp_path, monkeypatch):
    """Makes a machine with given boards on the real clock, or on a virtual one that the test moves."""

    def make(gpus: str = "H100,A100", *, virtual: bool = False) -> StandIn:
        monkeypatch.setenv("NVML_STANDIN_CLOCK", "virtual" if virtual else "real")
        state = tmp_path / "gpus.state"
        if standin_hooks.standin_open(str(state).encode(), gpus.encode()):
            raise OSError(f"cannot map {state}")
        return StandIn(standin_library, state, gpus, standin_hooks)

    return make


@pytest.fixture
def standin(make_standin) -> StandIn:
    """Two boards, an H100 and an A100, on the real clock."""
    return make_standin()
