"""The environment `instructions`: short texts under constraints that code can check."""
