"""What evaluations show: answers of two policy versions side by side, how the versions compare,
and what judges said."""
