"""Run the cells of a matrix as tasks on a Ray cluster; cards and captures are kept in a store that all machines can reach."""
