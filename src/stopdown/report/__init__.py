"""Rendering of records as self-contained HTML pages."""
