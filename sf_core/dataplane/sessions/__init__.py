"""Sessions: the token tree of one session, the matching of requests to it, branching and export. Samples
nothing (turns) and gives no sessions out (runs)."""
