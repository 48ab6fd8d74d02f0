"""Nodes, their devices and what their catalogues hold."""
