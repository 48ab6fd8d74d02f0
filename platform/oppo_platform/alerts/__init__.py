"""Alerts: rules about a team's runs, their evaluation, and delivery by mail and webhook."""
