"""`python -m tests.bench.dataplane.hasty`: a data plane that lets runs go as soon as they are over."""

from sf_core.cli.main import main
from sf_core.dataplane.control import plane

plane.LET_GO_S = 0.2
plane.SWEEP_S = 0.05

if __name__ == "__main__":
    main()
