"""The four roles' networks behind one interface: our own small transformer, and any Hugging Face decoder."""
