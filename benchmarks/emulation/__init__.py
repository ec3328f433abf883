"""An engine that computes nothing and takes as long as a device would, and the timing model behind it."""
