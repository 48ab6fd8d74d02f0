"""Alerts: conditions of a team's runs, and their delivery by mail and webhook."""
