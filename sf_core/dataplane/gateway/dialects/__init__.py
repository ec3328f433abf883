"""API dialects: request bodies to canonical requests, answers to response bodies, one module per API.
They know neither connections nor how turns are served."""
