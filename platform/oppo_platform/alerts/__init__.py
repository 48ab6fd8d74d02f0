"""Alerts: what a team wants to be told of its runs, when it is told, and how."""
