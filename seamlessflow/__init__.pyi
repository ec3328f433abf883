# the public names, read by __init__.py, type checkers and editors
from sf_core.agents.mcp_tools import mcp_tools as mcp_tools
from sf_core.agents.sandbox import Ended as Ended
from sf_core.agents.sandbox import Sandbox as Sandbox
from sf_core.agents.sandbox import SandboxError as SandboxError
from sf_core.agents.sandbox import open_sandbox as open_sandbox
from sf_core.agents.sandbox import why_no_sandbox as why_no_sandbox
from sf_core.agents.tool_loop import LostToolError as LostToolError
from sf_core.agents.tool_loop import Tool as Tool
from sf_core.agents.tool_loop import run_tool_loop as run_tool_loop
from sf_core.config.programs import SandboxLimits as SandboxLimits
from sf_core.environments.environment import Demonstration as Demonstration
from sf_core.environments.environment import Environment as Environment
from sf_core.environments.splits import Split as Split
from sf_core.environments.splits import split_of as split_of
from sf_core.reports.run import Run as Run
from sf_core.reports.run import open_run as open_run
from sf_core.types import Endpoint as Endpoint
from sf_core.types import NotJudged as NotJudged
from sf_core.types import Scored as Scored
from sf_core.types import Task as Task

__version__: str
