"""The command `sf`: its subcommands, its live view, and the processes that it starts. It does no work of a
run itself: flows and stages do that, and sf_core/reports reads what they have stored."""
