"""Model families for slime, one file per family; ``plugin.py`` registers them, and each is imported only when used."""
