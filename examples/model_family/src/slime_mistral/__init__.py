"""Mistral models for slime: ``plugin`` registers the family, ``model`` builds it and maps its weights."""
