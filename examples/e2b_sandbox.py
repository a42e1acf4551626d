"""Programs of a policy in sandboxes of E2B: `sandbox: {kind: ./e2b_sandbox.py:E2B}` of a reward that runs programs.

Needs `pip install e2b` and E2B_API_KEY.
"""

import os
import shlex
import time
from dataclasses import dataclass

from rewards.sandbox.run import Ending, Finished, SandboxError
from rlhf.errors import RecipeError


@dataclass(frozen=True)
class E2B:
    """A fresh sandbox for each program, without network."""

    template: str = "base"

    def refuse_absent(self, where):
        """Raise RecipeError where no key says who asks."""
        if "E2B_API_KEY" not in os.environ:
            raise RecipeError("E2B has no key", where=where, got="no E2B_API_KEY", hint="export E2B_API_KEY=...")

    async def run(self, program, *, stdin, files, bounds):
        """Run one program and say how it ended."""
        from e2b import AsyncSandbox, CommandExitException, SandboxException, TimeoutException

        words = ["python3", *program[1:]] if program[0] == "python" else list(program)
        begun = time.monotonic()
        try:
            box = await AsyncSandbox.create(self.template, timeout=int(bounds.wall_s) + 60, allow_internet_access=False)
        except SandboxException as error:
            raise SandboxError("a program could not be run", where="E2B", got=str(error)) from error
        try:
            for path, content in {**files, ".stdin": stdin}.items():
                await box.files.write(f"/tmp/work/{path}", content)
            done = await box.commands.run(
                f"{shlex.join(words)} < .stdin", cwd="/tmp/work", timeout=bounds.wall_s, envs={"PYTHONHASHSEED": "0"}
            )
            ending = Ending.OK
        except CommandExitException as error:
            done, ending = error, Ending.WRONG_EXIT
        except TimeoutException:
            return Finished(Ending.WALL_LIMIT, None, b"", b"", time.monotonic() - begun, 0.0, 0)
        except SandboxException as error:
            raise SandboxError("a program could not be run", where="E2B", got=str(error)) from error
        finally:
            await box.kill()
        most = bounds.output_kb * 1024
        output = done.stdout.encode()[:most], done.stderr.encode()[:most]
        return Finished(ending, done.exit_code, *output, time.monotonic() - begun, 0.0, 0)
