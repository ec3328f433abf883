"""The model card of a trained policy: RUN/policy/README.md."""
