"""Mistral models for slime: ``plugin`` declares the family, ``model`` builds it and maps its weights."""
