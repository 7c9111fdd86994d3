"""What slime-watch adds to slime."""
