"""Model families for slime, one file a family; ``plugin.py`` names them, and one is imported where it is built."""
