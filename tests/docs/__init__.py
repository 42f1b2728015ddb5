"""Tests of pages: what they say to type is typed."""
