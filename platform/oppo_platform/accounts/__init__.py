"""Users, teams, roles, login links and API tokens."""
