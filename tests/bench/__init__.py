"""What several folders of tests share: stands, engines, clients and runs. `fixtures.py` has the fixtures, and
tests/README.md a table of them."""
