"""What each device did, when, and why it was idle."""
