"""Does the answer depend on the batch? An engine against itself, under other neighbours, shapes and states."""
