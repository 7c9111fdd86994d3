"""Accounts for every prompt group and advises on what a run's numbers show."""
