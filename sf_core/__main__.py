"""`python -m sf_core` is `sf`."""

from sf_core.cli.main import main

main()
