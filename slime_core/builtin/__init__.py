"""Components that the core ships, as a plugin named ``core`` that registers through the same hooks as any other."""
