"""Write the files of the snapshot anew; that of a run by its test (tests/test_first_run.py), which takes a
minute."""

import os
import subprocess
import sys

from tests.bench.snapshot.files import FOLDER, WRITE

TESTS = [str(FOLDER / "test_snapshot.py"), str(FOLDER.parent / "test_first_run.py")]

if __name__ == "__main__":
    sys.exit(
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *TESTS], env=os.environ | {WRITE: "1"}
        ).returncode
    )
