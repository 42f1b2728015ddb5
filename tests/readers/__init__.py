"""Other programs that read our files, run in processes of their own."""
