"""The engine of spawned sites: one trainer process for each on this machine, reached over its Unix socket."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from wattgym.errors import UserError
from wattgym.federated.config import FederationConfig
from wattgym.federated.engine import Engine
from wattgym.federated.messages import Adapter, Evaluation, Fate, SiteFailure, SiteInfo, TrainReply, TrainRequest
from wattgym.federated.site.client import SOCKET_FILE, SiteClient
from wattgym.files import atomic_write_json, read_json_object

SITE_LOG = "site.log"
CONFIG_FILE = "federation.json"
RESTART_S = 2.0
"""A site that died is started again after this time; twice as long after each further death, up to 32 times."""

_ASK_S = 2.0
_REAP_S = 0.5
_STOP_S = 30.0


class SiteProcess:
    """One site's process, started again when it dies.

    Attributes:
        client: Reaches it.
    """

    def __init__(self, config_file: Path, name: str, folder: Path, *, outlive: bool) -> None:
        """Starts it, or takes over one that an earlier engine has left running in the folder."""
        self.client = SiteClient(folder / SOCKET_FILE)
        self._name = name
        self._folder = folder
        self._command = [sys.executable, "-P", "-m", "wattgym.federated.site", "--federation", str(config_file)]
        self._command += ["--site", name, "--folder", str(folder), "--owner", "0" if outlive else str(os.getpid())]
        self._process: subprocess.Popen[bytes] | None = None
        self._deaths = 0
        self._due_s = 0.0
        self._info: SiteInfo | None = None
        self._was_there = False
        if self.info() is None:
            self.start()

    @property
    def pid(self) -> int | None:
        """The process that this engine started; None for one taken over."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Starts the process."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._info = None
        with (self._folder / SITE_LOG).open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
                start_new_session=True,  # Ctrl-C reaches the engine, which decides what becomes of the sites
            )

    def info(self) -> SiteInfo | None:
        """Who it is, if it is there; starts it again if it has died.

        Raises:
            UserError: It refused to run from the beginning; the message is its own.
        """
        code = self._process.poll() if self._process is not None else None
        if code is not None:
            self._info = None
            if code == 2 and not self._was_there:  # what only the user can mend would come again
                raise UserError(f"site '{self._name}': {self.last_words()}")
            self._revive()
            return None
        if self._process is None and not self.client.is_there():
            if self._was_there:  # taken over, and gone
                self._info = None
                self._revive()
        elif self._info is None:
            with contextlib.suppress(UserError):
                self._info = self.client.info(_ASK_S)
                self._was_there = True
        return self._info

    def train(self, request: TrainRequest, deadline_s: float) -> TrainReply | SiteFailure:
        """See `SiteClient.train`; of a process that died on the way, the failure says how."""
        answer = self.client.train(request, deadline_s)
        if isinstance(answer, SiteFailure) and answer.fate is Fate.LOST and self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(_REAP_S)
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                return SiteFailure(Fate.LOST, f"its process {how}")
        return answer

    def stop(self) -> None:
        """Lets it save and end, by force after a while."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def last_words(self) -> str:
        """The last line of its log."""
        try:
            lines = (self._folder / SITE_LOG).read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError:
            lines = []
        return next((line.strip() for line in reversed(lines) if line.strip()), "it ended without a word")

    def _revive(self) -> None:
        now_s = time.monotonic()
        if not self._due_s:
            self._due_s = now_s + RESTART_S * 2.0 ** min(self._deaths, 5)
            self._deaths += 1
        if now_s >= self._due_s:
            self._due_s = 0.0
            self.start()


class ProcessEngine(Engine):
    """Sites as processes of this machine; what a site does to itself does nothing to the others."""

    name = "process"

    def __init__(self, config: FederationConfig, folder: Path, *, outlive: bool = False) -> None:
        """Starts the sites; they load in the background.

        Args:
            config: The federation.
            folder: Folder of the sites, one below it for each; sites that run in it already are taken over.
            outlive: The sites go on when this engine is closed or its process dies, for the next engine in the folder.

        Raises:
            UserError: The folder cannot be written, or sites of another federation run in it.
        """
        path = folder.absolute()
        _check_leftovers(config, path)
        atomic_write_json(path / CONFIG_FILE, config.model_dump(mode="json"))
        self._outlive = outlive
        self._sites: dict[str, SiteProcess] = {}
        try:
            for name in config.names:
                self._sites[name] = SiteProcess(path / CONFIG_FILE, name, path / name, outlive=outlive)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> dict[str, int | None]:
        """Processes of the sites."""
        return {name: site.pid for name, site in self._sites.items()}

    def members(self) -> Mapping[str, SiteInfo]:
        """Sites that answer; one whose process died is started again, and missing until it has loaded.

        Raises:
            UserError: A site refused to run from the beginning; the message is its own.
        """
        with ThreadPoolExecutor(max(len(self._sites), 1)) as pool:
            found = list(pool.map(lambda site: site.info(), self._sites.values()))
        return {name: info for name, info in zip(self._sites, found, strict=True) if info is not None}

    def exchange(
        self, requests: Mapping[str, TrainRequest], deadline_s: float
    ) -> Mapping[str, tuple[TrainReply | SiteFailure, float]]:
        """See `Engine.exchange`."""

        def ask(name: str) -> tuple[TrainReply | SiteFailure, float]:
            start_s = time.monotonic()
            site = self._sites.get(name)
            if site is None:
                return SiteFailure(Fate.LOST, "there is no such site"), 0.0
            return site.train(requests[name], deadline_s), time.monotonic() - start_s

        if not requests:
            return {}
        with ThreadPoolExecutor(len(requests)) as pool:
            return dict(zip(requests, pool.map(ask, requests), strict=True))

    def evaluate(
        self, adapter: Adapter, deadline_s: float, links_s: Mapping[str, float] | None = None
    ) -> Evaluation | SiteFailure:
        """See `Engine.evaluate`: the first site that can, the idle ones first."""
        until_s = time.monotonic() + deadline_s
        failure = SiteFailure(Fate.LOST, "no site is there to evaluate")
        for name, site in sorted(self._sites.items(), key=lambda item: _is_busy(item[1])):
            left_s = until_s - time.monotonic()
            if left_s <= 0.0:
                break
            found = site.client.evaluate(adapter, left_s, (links_s or {}).get(name, 0.0))
            if isinstance(found, Evaluation):
                return found
            failure = found
        return failure

    def close(self) -> None:
        """Ends the sites, unless they are to outlive the engine."""
        sites, self._sites = self._sites, {}
        if sites and not self._outlive:
            with ThreadPoolExecutor(len(sites)) as pool:
                list(pool.map(lambda site: site.stop(), sites.values()))


def _check_leftovers(config: FederationConfig, folder: Path) -> None:
    """Refuses a folder in which sites run that were started with another configuration."""
    file = folder / CONFIG_FILE
    if not file.is_file() or read_json_object(file) == config.model_dump(mode="json"):
        return
    for path in sorted(folder.glob(f"*/{SOCKET_FILE}")):
        try:
            info = SiteClient(path).info(_ASK_S)
        except UserError:
            continue  # nobody is there any more
        raise UserError(
            f"{folder}: site '{info.name}' (process {info.pid}) runs there with another federation file; "
            "stop it first, or choose another folder"
        )


def _is_busy(site: SiteProcess) -> int:
    try:
        return int(site.client.status(_ASK_S)["state"] != "idle")
    except UserError:
        return 2
