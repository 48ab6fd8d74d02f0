"""The notebook client. It arrives with the REST API (see ROADMAP in README)."""
