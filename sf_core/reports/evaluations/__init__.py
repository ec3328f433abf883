"""What evaluations show: answers of two policy versions side by side, and how the versions compare."""
