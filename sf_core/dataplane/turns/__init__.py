"""Turns: one request for one answer, with sampling, stopping, retries and recording. Knows no HTTP; which
engine samples is decided in routing."""
