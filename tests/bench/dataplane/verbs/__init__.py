from tests.bench.lazy import modules_of

__getattr__ = modules_of(__name__)
