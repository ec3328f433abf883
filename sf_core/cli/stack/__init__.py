"""The processes of a stack on one machine: their commands, a supervisor that keeps them running, and how they
are started, awaited and ended. The package does not know what the processes compute."""
