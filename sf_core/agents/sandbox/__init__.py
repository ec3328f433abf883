"""A sandbox for what models write: bubblewrap around it, and one of our processes inside."""

from sf_core.agents.sandbox.process import SandboxError, why_no_sandbox
from sf_core.agents.sandbox.sandbox import Ended, Sandbox, open_sandbox

__all__ = ["Ended", "Sandbox", "SandboxError", "open_sandbox", "why_no_sandbox"]
