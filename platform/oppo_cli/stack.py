"""The whole platform on one machine, as child processes of this one.

    PostgreSQL and Valkey → one-shot set-up (migrations, static files, first user) → web, scheduler, housekeeper → worker

Everything below holds a lifeline of this process: however it ends, nothing is left behind. Ports are remembered, so that a
restarted child is found where it was. With `DATABASE_URL` and `REDIS_URL` set, those servers are used and none is started.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from oppo_cli.home import Failure, Home, Running, without_secrets
from oppo_cli.processes import Child, Watch, oppo_command, start_logged
from oppo_contract.lifeline import Lifeline

WEB_WITHIN_S = 60.0
WORKER_STOPS_WITHIN_S = 30.0
PREFERRED_PORT = 8000


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the one-shot set-up answers (`oppo_cli.bootstrap`)."""

    join_token: str
    username: str
    password: str | None
    login_link: str
    api_token: str
    project: int


class Stack:
    """Starts, watches and stops the processes. Use as a context manager; only the main thread may."""

    def __init__(self, home: Home, *, port: int | None = None, host: str = "127.0.0.1") -> None:
        self.home, self.host = home, host
        self.lifeline = Lifeline()
        self.watch = Watch()
        self.children: list[Child] = []
        self.environ = self._base_environ(port)
        self.base_url = self.environ["OPPO_BASE_URL"]
        self.prepared: Prepared | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def start(self) -> Prepared:
        """Bring everything up; returns when the pages answer and the worker has joined. Raises Failure."""
        self._start_servers()
        prepared = self._prepare()
        self._add("scheduler", oppo_command("scheduler"), self.environ)
        web = self._add("web", oppo_command("web", "--host", self.host, "--port", self.environ["OPPO_PORT"]), self.environ)
        self._wait_for_web(web)
        self._add("housekeeper", oppo_command("housekeeper"), self.environ)
        self._join_worker(prepared.join_token)
        command = oppo_command("worker", "run")
        self._add("worker", command, without_secrets(self.environ), stop_within_s=WORKER_STOPS_WITHIN_S)
        self.home.tell(Running(os.getpid(), self.base_url, self.environ["DATABASE_URL"], self.environ["REDIS_URL"]))
        self.prepared = prepared
        return prepared

    def keep_alive(self, seconds: float = float("inf")) -> None:
        """Restart what died, for `seconds` or until a stop is asked for."""
        deadline = time.monotonic() + seconds
        while not self.watch.stop_asked:
            now = time.monotonic()
            look_again = min([deadline, *(child.look(now) for child in self.children)])
            if now >= deadline:
                return
            self.watch.wait(look_again - time.monotonic())

    def stop(self) -> None:
        """Stop everything, the worker first, the database last; a second Ctrl-C does not interrupt that."""
        self.watch.catch_stop()
        for child in reversed(self.children):
            child.end()
        self.children.clear()
        self.lifeline.close()

    def _base_environ(self, port: int | None) -> dict[str, str]:
        from oppo_platform.embedded.ports import save_port, saved_port

        chosen = port if port is not None else saved_port(self.home.path, "web", preferred=PREFERRED_PORT)
        save_port(self.home.path, "web", chosen)
        given = {key: os.environ[key] for key in ("OPPO_BASE_URL",) if os.environ.get(key)}
        settings = {
            "OPPO_HOME": str(self.home.path),
            "OPPO_PORT": str(chosen),
            "OPPO_BASE_URL": f"http://127.0.0.1:{chosen}",
            "OPPO_LOG_FORMAT": os.environ.get("OPPO_LOG_FORMAT", "text"),
        }
        return {**self.lifeline.environ(), **settings, **given}

    def _start_servers(self) -> None:
        from oppo_platform.embedded import PostgresServer, ServerError, ValkeyServer

        wanted = {"DATABASE_URL": PostgresServer, "REDIS_URL": ValkeyServer}
        try:
            servers = {variable: kind(self.home.path) for variable, kind in wanted.items() if not os.environ.get(variable)}
            for server in servers.values():
                child = Child(server.name, lambda server=server: server.start(self.lifeline.fd), server.log, stop_within_s=30.0)
                self.children.append(child)
                child.begin()
            for variable, server in servers.items():
                server.wait_until_ready()
                self.environ[variable] = server.url
        except ServerError as error:
            raise Failure(str(error)) from error

    def _prepare(self) -> Prepared:
        """Migrations, static files, first user, tokens: one process, so that this one never imports Django."""
        done = subprocess.run(
            [sys.executable, "-m", "oppo_cli.bootstrap"], env=self.environ, pass_fds=(self.lifeline.fd,),
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise Failure(f"The database could not be set up.\n{done.stderr[-3000:]}")
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return Prepared(**answer)

    def _join_worker(self, token: str) -> None:
        options = ["--name", "local", "--models-root", str(self.home.models)]
        command = oppo_command("worker", "join", self.base_url_here(), "-", *options)
        joined = subprocess.run(
            command, env=without_secrets(self.environ), pass_fds=(self.lifeline.fd,), input=token, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        if joined.returncode != 0:
            raise Failure(f"The local worker could not join.\n{joined.stderr[-2000:]}")

    def base_url_here(self) -> str:
        """The platform's address on this machine, also when `OPPO_BASE_URL` names a proxy."""
        return f"http://127.0.0.1:{self.environ['OPPO_PORT']}"

    def _wait_for_web(self, web: Child) -> None:
        """Until our own web process listens and answers. Raises Failure, also when somebody else took its port meanwhile."""
        from oppo_platform.embedded.ports import is_free

        port = int(self.environ["OPPO_PORT"])
        try:
            web.wait_until(lambda: listens(web.process, port) and self._web_answers(), WEB_WITHIN_S)
        except Failure as failed:
            if is_free(port):
                raise
            said = f"Port {port} is used by another program. Start without --port to use a free one."
            raise Failure(said) from failed

    def _web_answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.base_url_here()}/healthz", timeout=5) as answer:  # noqa: S310 - our own address
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _add(self, name: str, command: list[str], environ: dict[str, str], stop_within_s: float = 10.0) -> Child:
        log = self.home.logs / f"{name}.log"
        child = Child(name, lambda: start_logged(command, environ, self.lifeline.fd, log), log, stop_within_s)
        self.children.append(child)
        child.begin()
        return child


def listens(process: subprocess.Popen[bytes] | None, port: int) -> bool:
    """Whether this very process accepts connections there; another platform of the machine would answer just as well."""
    import psutil

    try:
        sockets = psutil.Process(process.pid).net_connections("tcp") if process is not None else []
    except psutil.Error:  # it has ended
        return False
    return any(s.status == psutil.CONN_LISTEN and s.laddr.port == port for s in sockets)
