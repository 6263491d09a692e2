"""`longmoe eval RUN --suite`: what it writes, and what it refuses."""
