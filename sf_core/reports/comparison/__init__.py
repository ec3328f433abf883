"""Several runs side by side: `sf report RUN RUN ...`."""
