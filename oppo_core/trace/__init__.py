"""Spans of each device, and causes of its idle time."""
