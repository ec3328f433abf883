"""Engines: token ids in, ids and log-probs out; and the client that connects one to the data plane. They know
no text, no sessions and no HTTP server."""
