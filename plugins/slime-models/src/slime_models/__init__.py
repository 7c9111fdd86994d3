"""Model families for slime, one file a family; ``plugin.py`` registers them, and each is imported only when used."""
