"""Mathematics that knows nothing of engines, processes or files: torch and numpy only."""
