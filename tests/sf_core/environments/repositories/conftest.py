from tests.examples.repositories.conftest import environment, generated, libraries

__all__ = ["environment", "generated", "libraries"]
