"""What slime-cpu adds to slime."""
