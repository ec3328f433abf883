"""A flow run that does nothing until it is killed."""

import time

from prefect import flow, tags


@flow(flow_run_name="asleep")
def sleeping() -> None:
    time.sleep(600)


if __name__ == "__main__":
    with tags("seamlessflow"):
        sleeping()
