"""The platform on one machine, as child processes.

    PostgreSQL and Valkey, static files → web, migrations, first user → worker, scheduler, housekeeper

All children hold a lifeline of this process and end with it. Ports are saved, so a restarted child keeps its port.
`DATABASE_URL` and `REDIS_URL` replace the built-in servers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

from oppo_cli.bootstrap import STATIC_FILES_BUILT
from oppo_cli.home import Failure, Home, RunningPlatform, without_secrets
from oppo_cli.processes import Child, SignalWaiter, StopRequested, last_lines, oppo_command, start_logged
from oppo_contract.lifeline import Lifeline

if TYPE_CHECKING:
    from oppo_platform.embedded import EmbeddedServer, PostgresServer

WEB_TIMEOUT_S = 60.0
WORKER_STOP_TIMEOUT_S = 30.0
DATABASE_CHECK_S = 5.0
PREFERRED_PORT = 8000
PORT_TAKEN = "Port {} is used by another program. Start without --port to use a free one."


@dataclass(frozen=True, slots=True)
class SetupResult:
    """Output of the one-time set-up (`oppo_cli.bootstrap`)."""

    join_token: str
    username: str
    password: str | None
    login_link: str
    api_token: str
    project: int


class Stack:
    """Starts, restarts and stops the processes. A context manager, for the main thread only."""

    def __init__(self, home: Home, *, port: int | None = None, host: str = "127.0.0.1") -> None:
        self.home, self.host = home, host
        self.lifeline = Lifeline()
        self.signals = SignalWaiter()
        self.children: list[Child] = []
        self.postgres: PostgresServer | None = None
        self.environ = self._base_environ(port)
        self.base_url = self.environ["OPPO_BASE_URL"]
        self.start_log = self.home.logs / "start.log"  # errors of the processes that only the start has

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, StopRequested):
            sys.stderr.write(f"{error}: stopping before the start was complete…\n")
        self.stop()

    def start(self) -> SetupResult:
        """Start everything; returns when web responds and the worker has joined.

        Raises:
            Failure: something cannot be started.
            StopRequested: a signal meanwhile. What was begun is repeated at the next start.
        """
        self.signals.raise_on_stop()
        self.start_log.unlink(missing_ok=True)
        servers = self._own_servers()
        with self._loading([sys.executable, "-m", "oppo_cli.bootstrap"], self.environ) as set_up:
            self._start_servers(servers)
            assert set_up.stdin is not None
            set_up.stdin.close()
            self._line_of(set_up, STATIC_FILES_BUILT)
            web = self._add("web", oppo_command("web", "--host", self.host, "--port", self.environ["OPPO_PORT"]), self.environ)
            with self._loading(self._join_command(), without_secrets(self.environ)) as join:
                setup = SetupResult(**json.loads(self._line_of(set_up, "{")))
                self._wait_for_web(web)
                join.communicate(setup.join_token)
                if join.returncode != 0:
                    raise self._failure("The local worker could not join", join)
        self._add("scheduler", oppo_command("scheduler"), self.environ)
        self._add("housekeeper", oppo_command("housekeeper"), self.environ)
        command = oppo_command("worker", "run")
        self._add("worker", command, without_secrets(self.environ), stop_timeout_s=WORKER_STOP_TIMEOUT_S)
        self.home.save_running(
            RunningPlatform(os.getpid(), self.base_url, self.environ["DATABASE_URL"], self.environ["REDIS_URL"])
        )
        self.signals.catch_stop()
        return setup

    def keep_alive(self, seconds: float = float("inf")) -> None:
        """Restart processes that end, for `seconds` or until a stop is requested."""
        deadline = time.monotonic() + seconds
        while not self.signals.stop_requested:
            now = time.monotonic()
            if self.postgres is not None and self.postgres.hasten_shutdown():
                sys.stderr.write("postgres was asked to shut down by another program; it is started again\n")
            next_check = min([deadline, now + DATABASE_CHECK_S, *(child.check(now) for child in self.children)])
            if now >= deadline:
                return
            self.signals.wait(next_check - time.monotonic())

    def stop(self) -> None:
        """Stop everything in reverse order; a second Ctrl-C does not interrupt it."""
        self.signals.catch_stop()
        for child in reversed(self.children):
            child.stop()
        self.children.clear()
        self.lifeline.close()

    def _base_environ(self, port: int | None) -> dict[str, str]:
        from oppo_platform.embedded.ports import is_free, save_port, saved_port

        if port is not None and not is_free(port):
            raise Failure(PORT_TAKEN.format(port))
        web_port = port if port is not None else saved_port(self.home.path, "web", preferred=PREFERRED_PORT)
        save_port(self.home.path, "web", web_port)
        settings = {
            "OPPO_HOME": str(self.home.path),
            "OPPO_PORT": str(web_port),
            "OPPO_BASE_URL": os.environ.get("OPPO_BASE_URL") or f"http://127.0.0.1:{web_port}",
            "OPPO_LOG_FORMAT": os.environ.get("OPPO_LOG_FORMAT", "text"),
        }
        return {**self.lifeline.environ(), **settings}

    def _own_servers(self) -> list[EmbeddedServer]:
        """The built-in servers that no variable replaces; their URLs are in `environ` from here on."""
        from oppo_platform.embedded import PostgresServer, ServerError, ValkeyServer

        servers: list[EmbeddedServer] = []
        try:
            for variable, create in (("DATABASE_URL", PostgresServer), ("REDIS_URL", ValkeyServer)):
                if not os.environ.get(variable):
                    server = create(self.home.path)
                    server.claim()
                    servers.append(server)
                    self.environ[variable] = server.url
        except ServerError as error:
            raise Failure(str(error)) from error
        return servers

    def _start_servers(self, servers: list[EmbeddedServer]) -> None:
        from oppo_platform.embedded import PostgresServer, ServerError

        def launch(server: EmbeddedServer) -> subprocess.Popen[bytes]:
            try:
                return server.start(self.lifeline.fd)
            except ServerError as error:
                raise Failure(str(error)) from error

        for server in servers:
            self.postgres = server if isinstance(server, PostgresServer) else self.postgres
            child = Child(server.name, partial(launch, server), server.log, stop_timeout_s=30.0)
            self.children.append(child)
            child.launch()
        try:
            for server in servers:
                server.wait_until_ready()
        except ServerError as error:
            raise Failure(str(error)) from error

    @contextmanager
    def _loading(self, command: list[str], environ: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
        """A process that loads its modules, then waits for the end of its input; killed if the start fails.

        So that modules are loaded while others work, and this process never imports Django.
        """
        with self.start_log.open("ab") as log, subprocess.Popen(
            command, env=environ, pass_fds=(self.lifeline.fd,), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            text=True,
        ) as process:  # fmt: skip
            try:
                yield process
            except BaseException:
                process.kill()
                raise

    def _line_of(self, set_up: subprocess.Popen[str], beginning: str) -> str:
        """The next line that the set-up prints with this beginning. Raises Failure if it ends instead."""
        assert set_up.stdout is not None
        for line in set_up.stdout:
            if line.startswith(beginning):
                return line
        raise self._failure("The database could not be set up", set_up)

    def _failure(self, what: str, process: subprocess.Popen[str]) -> Failure:
        return Failure(f"{what} (status {process.wait()}, {self.start_log}).\n{last_lines(self.start_log)}")

    def _join_command(self) -> list[str]:
        return oppo_command("worker", "join", self.local_url(), "-", "--name", "local", "--models-root", str(self.home.models))

    def local_url(self) -> str:
        """URL of the platform on this machine; `OPPO_BASE_URL` may be a proxy's."""
        return f"http://127.0.0.1:{self.environ['OPPO_PORT']}"

    def _wait_for_web(self, web: Child) -> None:
        """Wait until our web process listens and responds. Raises Failure, also if another program took the port."""
        from oppo_platform.embedded.ports import is_free

        port = int(self.environ["OPPO_PORT"])
        try:
            web.wait_until(lambda: is_listening(web.process, port) and self._web_responds(), WEB_TIMEOUT_S)
        except Failure as error:
            if is_free(port):
                raise
            raise Failure(PORT_TAKEN.format(port)) from error

    def _web_responds(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.local_url()}/healthz", timeout=5) as response:  # noqa: S310 - our own URL
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _add(self, name: str, command: list[str], environ: dict[str, str], stop_timeout_s: float = 10.0) -> Child:
        log = self.home.logs / f"{name}.log"
        child = Child(name, lambda: start_logged(command, environ, self.lifeline.fd, log), log, stop_timeout_s)
        self.children.append(child)
        child.launch()
        return child


def is_listening(process: subprocess.Popen[bytes] | None, port: int) -> bool:
    """Whether this process listens on the port; another platform on this machine would respond too."""
    import psutil

    try:
        sockets = psutil.Process(process.pid).net_connections("tcp") if process is not None else []
    except psutil.Error:
        return False
    return any(s.status == psutil.CONN_LISTEN and s.laddr.port == port for s in sockets)
