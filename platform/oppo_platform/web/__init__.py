"""Middleware of every request: security headers, static files, health."""
