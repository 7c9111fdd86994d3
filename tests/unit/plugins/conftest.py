from tests.plugin_files import site

__all__ = ["site"]
