"""Sandboxes by podman, of an OCI image: where the system of the host is not to be seen, or has no bubblewrap.

Written by its manual (podman-run(1) of version 5, with crun) and not run: there was none where this was made.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence

from sf_core.agents.sandbox import porter
from sf_core.agents.sandbox.bubblewrap import PORTER, SHARED_MEMORY_MB
from sf_core.config.programs import WORK, SandboxLimits


def command_line(
    limits: SandboxLimits,
    words: Sequence[str],
    channel: int,
    programs: Iterable[str] = (),
) -> list[str]:
    """The command line of a sandbox, with the parameters of bubblewrap's."""
    user = f"{porter.USER}:{porter.USER}"
    options = ["--rm", "--network=none", "--read-only", "--read-only-tmpfs=false", "--hostname=sandbox"]
    options += ["--cap-drop=all", "--security-opt=no-new-privileges", f"--user={user}", f"--workdir={WORK}"]
    options += [f"--memory={limits.memory_mb}m", f"--memory-swap={limits.memory_mb}m"]
    # the porter is one of them
    options += [f"--pids-limit={limits.processes + 1}", f"--shm-size={SHARED_MEMORY_MB}m"]
    for folder, mode in ((WORK, "0755"), ("/tmp", "1777")):
        owner = f"uid={porter.USER},gid={porter.USER}"
        options += ["--tmpfs", f"{folder}:rw,exec,nosuid,nodev,size={limits.disk_mb}m,mode={mode},{owner}"]
    for source, place in [(porter.__file__, PORTER), *((path, path) for path in (*limits.paths, *programs))]:
        options += ["--volume", f"{source}:{place}:ro"]
    return [
        program(),
        "run",
        *options,
        f"--preserve-fd={channel}",
        "--entrypoint=",
        str(limits.image),
        *words,
    ]


def program() -> str:
    """Raises FileNotFoundError, one sentence, if there is none."""
    found = shutil.which("podman")
    if found is None:
        raise FileNotFoundError("there is no podman on this host, and sandbox.image needs it")
    return found


def python() -> str:
    """The Python that runs the porter."""
    return "python3"


def variables() -> dict[str, str]:
    """The variables of every command inside."""
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": porter.HOME, "TMPDIR": "/tmp", "LANG": "C.UTF-8"}
