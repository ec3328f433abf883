"""The contracts of what users may write or plug in, as tests: dialects, engines, environments, trainers."""
