"""Where DEADPOOL meets a training framework."""
