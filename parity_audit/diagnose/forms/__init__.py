"""What a component made of its inputs, in words, where no constant explains it."""
