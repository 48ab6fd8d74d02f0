"""Overlap for other trainers."""
