"""The command `sf`: its subcommands, its live view, and the processes that it starts. It does no work of a
run itself: flows and stages do that, and sf_core/reports reads what they have stored."""

from sf_core.process.import_path import import_from

# before other modules of ours are imported: the user's folder may have files with the names of our packages
import_from([])
