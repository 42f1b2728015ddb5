"""One component call as a graph: its nodes, its blocks of rows, and how large its values get."""
