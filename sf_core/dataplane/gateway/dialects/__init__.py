"""One module per API dialect; which one a request speaks."""
