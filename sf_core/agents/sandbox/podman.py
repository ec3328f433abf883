"""Sandboxes by podman, of an OCI image: where the system of the host is not to be seen, or has no
bubblewrap."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterable, Sequence

from sf_core.agents.sandbox import porter
from sf_core.agents.sandbox.bubblewrap import PORTER, SHARED_MEMORY_MB
from sf_core.agents.sandbox.cgroups import SPARE_MB
from sf_core.config.programs import WORK, SandboxLimits

CHANNEL = 3
"""Number of the porter's channel: podman hands on what is open from 3 on."""

ULIMITS = (("nofile", resource.RLIMIT_NOFILE, 2**20), ("nproc", resource.RLIMIT_NPROC, 2**15))
"""Limits of the porter, which sets those of commands."""

# podman's monitor leaves a file where it runs when there was no memory; in /proc it cannot
_HANDING_ON_STANDARD_INPUT = ("/bin/sh", "-c", f'cd /proc && exec "$@" {CHANNEL}<&0 </dev/null', "sh")


def command_line(limits: SandboxLimits, words: Sequence[str], programs: Iterable[str] = ()) -> list[str]:
    """The command line of a sandbox, with the parameters of bubblewrap's."""
    options = ["--rm", "--pull=never", "--log-driver=none", "--network=none", "--hostname=sandbox"]
    options += ["--read-only", "--read-only-tmpfs=false", f"--user={porter.USER}:{porter.USER}"]
    options += ["--cap-drop=all", "--security-opt=no-new-privileges", f"--workdir={WORK}"]
    # or the porter could not forbid user namespaces to what runs inside
    options += ["--security-opt=unmask=/proc/sys"]
    memory = f"{limits.memory_mb + SPARE_MB}m"
    options += [f"--memory={memory}", f"--memory-swap={memory}"]
    # the porter is one of them
    options += [f"--pids-limit={limits.processes + 1}", f"--shm-size={SHARED_MEMORY_MB}m"]
    # podman's defaults need a right that root in a container does not have
    for name, kind, most in ULIMITS:
        _, hard = resource.getrlimit(kind)
        limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
        options += [f"--ulimit={name}={limit}:{limit}"]
    for folder, mode in ((WORK, "0755"), ("/tmp", "1777")):
        options += ["--tmpfs", f"{folder}:rw,exec,nosuid,nodev,size={limits.disk_mb}m,mode={mode},U"]
    for source, target in [(porter.__file__, PORTER), *((path, path) for path in (*limits.paths, *programs))]:
        options += ["--volume", f"{source}:{target}:ro"]
    options += ["--preserve-fds=1", "--entrypoint="]
    return [*_HANDING_ON_STANDARD_INPUT, program(), "run", *options, str(limits.image), *words]


def program() -> str:
    """Raises FileNotFoundError, one sentence, if there is none."""
    program = shutil.which("podman")
    if program is None:
        raise FileNotFoundError("podman is not installed on this host, but sandbox.image needs it")
    return program


def python() -> str:
    """The Python that runs the porter."""
    return "python3"


def variables() -> dict[str, str]:
    """The variables of every command inside."""
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": porter.HOME, "TMPDIR": "/tmp", "LANG": "C.UTF-8"}
