"""Nodes, their devices and catalogues."""
