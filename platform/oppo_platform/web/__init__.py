"""What every request passes: security headers, static files, health."""
