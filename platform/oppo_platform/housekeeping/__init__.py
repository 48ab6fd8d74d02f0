"""The housekeeper process: periodic work of every app."""
