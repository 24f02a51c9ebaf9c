"""Commands to a SuperLink: who may take part, start a run, follow it. It is Flower's own `flwr` that talks to it."""

from __future__ import annotations

import json
import os
import queue
import re
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from wattgym.errors import UserError
from wattgym.federated.flower import require_flower
from wattgym.federated.flower.app_folder import Scalar, toml, write_app
from wattgym.files import atomic_write_text

CONNECTION = "wattgym"
COMMAND_S = 300.0
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_STARTED = re.compile(r"Successfully started run (\d+)")
_FAILED = re.compile(r"ERROR\s*:\s+ServerApp raised an exception")  # A traceback follows.
_RAISED = "ServerApp failed with exception: "

# One process registers all sites: every `flwr` command spends a second on its imports.
_REGISTER = """
import json, sys
from flwr.cli.app import app
for site, key in json.load(sys.stdin):
    app(["supernode", "register", key, sys.argv[1], "--name", site], standalone_mode=False)
"""


def environment(home: Path) -> dict[str, str]:
    """Environment for every Flower process: nothing leaves the machine, nothing is installed, state stays in `home`.

    Args:
        home: Folder for Flower's configuration and the apps that it unpacks.
    """
    programs = str(Path(sys.executable).parent)
    return {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
        "RAY_USAGE_STATS_ENABLED": "0",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "NO_COLOR": "1",
    }


class Control:
    """A SuperLink's operator.

    Attributes:
        address: The SuperLink's `host:port`.
        environment: Environment of Flower's programs here.
    """

    def __init__(self, address: str, ca_certificate: Path, folder: Path) -> None:
        """Prepares Flower's configuration and the app.

        Args:
            address: The SuperLink's `host:port`.
            ca_certificate: Certificate that the SuperLink's is signed with.
            folder: Private folder for both.

        Raises:
            UserError: Flower is missing, the address is none, or the certificate cannot be read.
        """
        require_flower()
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise UserError(f"SuperLink address '{address}': expected host:port, for example 10.0.0.5:8000")
        self.address = address
        self._home = folder / "flwr"
        self.environment = environment(self._home)
        self._host, self._port = host.strip("[]"), int(port)
        authority = ca_certificate.resolve()
        try:
            self._trust = ssl.create_default_context(cafile=authority)
        except ssl.SSLError:
            raise UserError(f"{ca_certificate}: not a certificate in PEM format") from None
        except OSError as error:
            raise UserError(f"{ca_certificate}: cannot read: {error.strerror}") from None
        self._app = write_app(folder / "app")
        self._run: str | None = None
        connection: dict[str, Scalar] = {"address": address, "root-certificates": str(authority)}
        atomic_write_text(self._home / "config.toml", f"[superlink.{CONNECTION}]\n{toml(connection)}")

    def check(self) -> None:
        """Makes sure that the SuperLink answers and shows a certificate that can be trusted.

        Raises:
            UserError: It does not.
        """
        try:
            with socket.create_connection((self._host, self._port), timeout=10) as plain:
                self._trust.wrap_socket(plain, server_hostname=self._host).close()
        except ssl.SSLCertVerificationError as error:
            raise UserError(f"SuperLink at {self.address}: {error.verify_message}") from None
        except OSError as error:
            raise UserError(f"no SuperLink answers at {self.address}: {error.strerror or error}") from None

    def register(self, public_keys: Mapping[str, Path]) -> None:
        """Lets the holders of keys take part.

        Args:
            public_keys: By name of the site.

        Raises:
            UserError: The SuperLink refuses.
        """
        keys = [[site, str(path)] for site, path in public_keys.items()]
        self._command([sys.executable, "-c", _REGISTER, CONNECTION], "register sites", json.dumps(keys))

    def run(
        self, config: Mapping[str, Scalar], show: Callable[[str], None], watch: Callable[[], object] = lambda: None
    ) -> None:
        """Runs the app to its end.

        Args:
            config: Run configuration, see `RUN_CONFIG`.
            show: Takes each line of the server app's output.
            watch: Called every second; what it raises ends the waiting.

        Raises:
            UserError: The run could not be started, or failed.
        """
        overrides = self._home / "run.toml"
        atomic_write_text(overrides, toml(config))
        command = [self._flwr, "run", str(self._app), CONNECTION, "--run-config", str(overrides), "--stream"]
        stream = subprocess.Popen(
            command,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._run, said, failed = None, "", False
        try:
            for line in _lines(stream, watch):
                if self._run is None:
                    said += line
                    if started := _STARTED.search(line):
                        self._run = started.group(1)
                elif not (failed := failed or _FAILED.match(line) is not None):
                    show(line.rstrip("\n"))
        except BaseException:
            stream.kill()
            raise
        finally:
            stream.wait()
        if self._run is None:
            raise UserError(f"`flwr run` at {self.address}: {last_line(said)}")
        self._conclude(self._run)

    def stop(self) -> None:
        """Ends the run that was started last, if it is still going on.

        Raises:
            UserError: The SuperLink does not answer.
        """
        if self._run is not None:
            self._command([self._flwr, "stop", self._run, CONNECTION], "stop the run")

    def _conclude(self, number: str) -> None:
        """Raises if a run did not end well."""
        command = [self._flwr, "list", CONNECTION, "--run-id", number, "--format", "json"]
        answer = self._command(command, "ask for the run's end")
        try:
            run = json.loads(answer)["runs"][0]
            status, details = str(run["status"]), str(run["status-details"])
        except (ValueError, KeyError, IndexError, TypeError):
            raise UserError(f"SuperLink at {self.address}: says nothing of run {number}") from None
        if status != "finished:completed":
            raise UserError(
                details.removeprefix(_RAISED) if details.startswith(_RAISED) else f"run {status}: {details}"
            )

    @property
    def _flwr(self) -> str:
        return str(Path(sys.executable).parent / "flwr")

    def _command(self, command: list[str], purpose: str, stdin: str = "") -> str:
        """What a command prints.

        Raises:
            UserError: It fails, or takes too long.
        """
        try:
            done = subprocess.run(
                command,
                env=self.environment,
                input=stdin,
                capture_output=True,
                text=True,
                timeout=COMMAND_S,
            )
        except subprocess.TimeoutExpired:
            raise UserError(f"SuperLink at {self.address}: no answer within {COMMAND_S:g} s ({purpose})") from None
        if done.returncode != 0:
            raise UserError(f"SuperLink at {self.address}: cannot {purpose}: {last_line(done.stderr or done.stdout)}")
        return done.stdout


def _lines(process: subprocess.Popen[str], watch: Callable[[], object]) -> Iterator[str]:
    """The lines that a process prints, without colours, as they come."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout as source:
            for line in source:
                lines.put(_COLOUR.sub("", line))
        lines.put(None)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    while True:
        try:
            line = lines.get(timeout=1.0)
        except queue.Empty:
            watch()
            continue
        if line is None:
            reader.join()
            return
        yield line


def last_line(text: str) -> str:
    """The last line that says something, without colours and frames."""
    lines = [re.sub(r"^[\s│╭╰─]+|[\s│╮╯─]+$", "", line) for line in _COLOUR.sub("", text).splitlines()]
    told = [line for line in lines if line]
    return told[-1] if told else "no output"
