"""Guards that a restructuring loses nothing: what today's code does, stored, and tests that compare with it."""
