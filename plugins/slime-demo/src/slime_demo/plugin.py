"""What slime-demo adds to slime."""
