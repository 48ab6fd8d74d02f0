"""How an optimizer's step is taken: in one process's memory, or sharded over the ranks."""
